"""Models with outputs computed by transformers."""
