"""Arithmetic of deployments: KV memory, load tests, service objectives."""
