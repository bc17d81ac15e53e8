"""The command `tools/lm_eval`."""
