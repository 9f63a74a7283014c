"""What the manager shows to others: HTTP port, metrics, tracing, KV events, recordings."""
