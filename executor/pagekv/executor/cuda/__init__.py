"""The CUDA backend: transformers models over a paged block pool on the GPU, with PageKV's own attention kernels."""

from pagekv.executor.openmp import shorten_spinning

shorten_spinning()
