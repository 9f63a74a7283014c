"""Spans of requests, exported over OpenTelemetry."""
