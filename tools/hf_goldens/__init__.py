"""Goldens of imported Hugging Face models, from import to export."""
