"""Callers: identities and roles, their proof, the role that each call needs, and the record of refusals."""
