"""A group of ranks: rank 0 hands steps on, and every rank does the same with them (DESIGN 4, Ranks). No torch but in
`rendezvous`.

A reader may take the modules in this order:

    the start                   rendezvous, gathering, agreement, start_errors
    steps                       leader, follower, reports, calls
    connections                 link, watch
"""
