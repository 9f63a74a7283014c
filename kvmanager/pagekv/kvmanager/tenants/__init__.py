"""Tenants: each one's limits and usage, and the namespaces that tenants share."""
