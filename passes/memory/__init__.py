"""Where the values of a lowered graph lie, and what runs: for `plan_memory`, grouping and code generators."""
