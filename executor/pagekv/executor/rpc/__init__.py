"""The executor's gRPC service."""
