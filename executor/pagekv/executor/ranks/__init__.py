"""A group of ranks: rank 0 passes steps on, and every rank executes the same steps (DESIGN 4, Ranks). Only `rendezvous`
imports torch.

A reader may take the modules in this order:

    the start                   rendezvous, gathering, agreement, start_errors
    steps                       leader, follower, reports, calls
    connections                 link, watch
"""
