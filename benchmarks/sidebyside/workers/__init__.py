"""One file per engine, each with the same `Session`; run as a module in that engine's environment."""
