"""Transformers models as the backends run them: loading, attention interface, description; and the families of models
that backends compute by loops or kernels of their own (`decoder`).
"""
