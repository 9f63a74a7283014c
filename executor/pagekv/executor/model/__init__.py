"""Transformers models as the backends run them: loading, attention interface, the shape of keys and values."""
