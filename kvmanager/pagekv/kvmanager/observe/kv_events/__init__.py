"""Prefix table changes over ZeroMQ, in vLLM's format."""
