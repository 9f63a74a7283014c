"""The engine loop and its link to the executor: plans steps, sends them, takes results in, recovers."""
