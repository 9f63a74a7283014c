"""Transformers models as the backends run them: loading, attention interface and description. `decoder` has the
families of models that backends compute with loops or kernels of their own.
"""
