"""Speculation: drafters propose tokens, the target verifies them, and no bit of the output changes."""
