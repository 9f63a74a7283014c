"""A backend without a model: every slot that a step reads is checked, and the tokens are known in advance."""
