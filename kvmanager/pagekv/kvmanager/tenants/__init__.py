"""Tenants: what each may take, what it took, and the namespaces that they share."""
