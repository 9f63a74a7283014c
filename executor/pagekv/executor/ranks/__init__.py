"""A group of ranks: rank 0 hands steps on, and every rank does the same with them (DESIGN 4, Ranks). No torch but in
`rendezvous`.
"""
