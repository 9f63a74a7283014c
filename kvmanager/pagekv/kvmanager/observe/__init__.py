"""Observability: HTTP port, metrics, tracing, KV events, recordings."""
