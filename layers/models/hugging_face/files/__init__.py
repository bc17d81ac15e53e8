"""Weights on disk: safetensors files, as they are and quantized."""
