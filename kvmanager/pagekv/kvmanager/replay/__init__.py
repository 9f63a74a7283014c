"""Replays recorded workloads on the real scheduler and block pool, without a model: see `pagekv replay --help`."""
