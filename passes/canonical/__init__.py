"""The rules of `canonicalize`, by subject."""
