"""Models of Hugging Face's transformers: their shapes, and their weights."""
