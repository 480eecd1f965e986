"""Drafts beside none, in pairs of runs on one engine."""
