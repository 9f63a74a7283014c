"""Transformers models as the backends run them: loading, attention interface, description."""
