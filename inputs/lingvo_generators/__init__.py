"""Inputs over generators of batches, as Lingvo has them."""
