"""Convolutions, pooling and image encoders."""
