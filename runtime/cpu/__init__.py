"""Running the CPU target: the C ABI, the memory of its steps, the executor."""
