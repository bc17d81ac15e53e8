"""Loss functions of models, and losses that layers add."""
