"""Loops that Numba compiles, run on the threads of torch's own OpenMP."""
