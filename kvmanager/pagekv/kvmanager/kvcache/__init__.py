"""KV memory as the manager keeps it: pools, prefix table, eviction, pins. The ground floor: knows blocks and token ids, no requests."""
