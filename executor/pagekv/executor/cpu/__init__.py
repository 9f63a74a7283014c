"""The CPU backend: runs transformers models over PageKV's paged block pool, with torch. `native` holds the compiled
loops.

A reader may take the modules in this order:

    a step                      backend, runner, attention_plan, forward, sampler
    by loops                    fused_decoder, sharded_decoder, decoder_inputs, rotations, products, paged_reads
    by transformers' model      gathered_reads, gathered_attention, linear, experts
    memory                      kv_cache, step_memory
    the start                   choose_forward, routing, profile
    threads and processor       threads, openmp_runtime, instruction_set
"""

from pagekv.executor.machine import shorten_spinning

# For other importers. An executor has torch by now, and `import_torch` has called this before.
shorten_spinning()
