"""The command `tools/ckpt`."""
