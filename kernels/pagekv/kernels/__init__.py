"""CUDA kernels of the executor. Empty until the GPU backend lands."""
