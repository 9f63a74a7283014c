"""A backend without a model: it checks every slot that a step reads, and its tokens are known in advance."""
