"""The check of a machine's devices that `tools/gpu_check` runs."""
