"""Fairness among tenants that compete: whose request is next, what each may hold, and how long a step may be for the
sake of newcomers.
"""
