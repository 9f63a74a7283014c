"""KV memory as the manager keeps it: pools, prefix table, eviction, pins; it knows block and token ids alone."""
