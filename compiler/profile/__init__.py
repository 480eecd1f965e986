"""Where a step's time goes, beside what the machine allows: measured limits, costs, recorded steps."""
