"""Attention: masks as data, kernels, caches, and the layers that use them."""
