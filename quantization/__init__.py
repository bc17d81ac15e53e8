"""Quantization: number formats, recipes and quantized matmuls."""
