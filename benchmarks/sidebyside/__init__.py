"""Octavo and another engine in turn, on the same prompts, in one run."""
