"""Prometheus metrics of the engine."""
