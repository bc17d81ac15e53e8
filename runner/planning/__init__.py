"""`--mode=plan`, the program; what it measures with is in `runner/plan`."""
