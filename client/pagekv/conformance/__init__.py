"""Judges an executor from outside, by the rules of executor_service.proto: `pagekv-conformance`."""
