"""CUDA kernels of the executor, and the modules that compile, plan and launch them: paged attention over the block
pool, row-wise operators, the sampler, block copies. The CUDA C++ is in `src`; `bench` measures the kernels.

A reader may take the modules in this order:

    attention                   attention, attention_plan, attention_launch
    decodes                     decode_plan, shared_splits
    prompts                     prefill_plan, prefill_splits
    other kernels               rows, sampling, swap
    a launch                    launch_config, params, tensors, cupy_launcher
    compilation                 variants, sources, nvrtc, machine_code
    torch and the system        failed_recording, host_memory
"""
