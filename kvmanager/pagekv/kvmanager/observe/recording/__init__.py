"""Workloads and steps recorded to files."""
