"""CUDA kernels of the executor: paged attention over the block pool, and what compiles, plans and starts it."""
