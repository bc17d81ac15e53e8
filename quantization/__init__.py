"""Quantization: number formats, recipes and the products that use them."""
