"""Input pipelines: sources, tokenizers, packing and the data position."""
