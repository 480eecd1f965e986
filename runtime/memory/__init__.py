"""Memory: what an engine will hold is planned, shown and refused before any of it is mapped."""
