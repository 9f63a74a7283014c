"""The CUDA backend: transformers models over a paged block pool on the GPU, with PageKV's own attention kernels."""

from pagekv.executor.machine import shorten_spinning

shorten_spinning()
