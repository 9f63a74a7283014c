"""Callers: their identities and roles, how they prove them, which role each call needs, and the record of refusals."""
