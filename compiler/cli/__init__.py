"""The `octavo` command: one file per subcommand, each importing what is heavy only when it runs."""
