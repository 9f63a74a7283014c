"""The first half hour on a GPU: `make gpu-first`, three parts of at most nine minutes, and its rehearsal without one.

`parts` is the table of what is done; `runner` does it, each step in a process of its own; `step` is that process;
`records` is what survives a crash; `page` puts predictions and measurements side by side.
"""
