"""What runs and where values lie in memory: for `plan_memory`, grouping and code generators."""
