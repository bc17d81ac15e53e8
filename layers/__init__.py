"""Building blocks of neural networks, as plain flax linen modules."""
