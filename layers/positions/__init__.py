"""Position embeddings and rotary positions."""
