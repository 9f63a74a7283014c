"""Every scheduling decision: admission, preemption, chunked prefill, swapping, beams. Requests in, step plans out."""
