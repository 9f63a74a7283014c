"""The CUDA backend: runs transformers models over a paged block pool on the GPU, with PageKV's own attention kernels.

A reader may take the modules in this order:

    a step                      backend, runner, step_inputs, forward, kernel_attention, graphs
    in fused layers             fused_decoder
    its tokens                  step_sampling, kernel_sampler, torch_sampler, penalties, logprobs
    over ranks                  rank_sampling, rank_marks
    memory and the device       pools, device
    the start                   preflight, choose_forward, choose_sampler
"""

from pagekv.executor.machine import shorten_spinning

# For other importers. An executor has torch by now, and `import_torch` has called this before.
shorten_spinning()
