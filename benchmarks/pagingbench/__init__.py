"""What the runtime's paging, sharing and scheduling cost, each measurement in a file of its own."""
