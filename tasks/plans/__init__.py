"""Golden plans: plans of experiments on target hardware, stored as files."""
