"""Every scheduling decision: admission, preemption, chunked prefill, swapping, beams. Turns requests into step plans."""
