"""The command `tools/hf`."""
