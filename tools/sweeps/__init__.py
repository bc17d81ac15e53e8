"""The command `tools/sweep`."""
