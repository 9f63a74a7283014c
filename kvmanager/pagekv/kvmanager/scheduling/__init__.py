"""Every scheduling decision: admission, preemption, chunked prefill, swapping, beams. Requests in, step plans out.
Fairness among competing tenants is in `fairness`.

A reader may take the modules in this order:

    what is scheduled           sequence, queues, decode_batch, step_plan, limits, counters
    a step                      scheduler, step_builder, admission, block_tables, publishing, prepared_prompt
    memory and bytes run out    preemption, swapping, step_room, encoded_sizes
    sequences of one request    shared_prefill, beam_search, beam_scheduler
    besides                     failures, listener
"""
