"""The `octavo` command: one file per subcommand. What is heavy is imported inside the subcommand that needs it."""
