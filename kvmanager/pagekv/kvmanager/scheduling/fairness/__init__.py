"""Fairness among tenants that compete: whose request is next, what each may hold, how long a step may be."""
