"""The CPU-only KV-manager: block pool, prefix cache, scheduler and the services clients call."""
