"""Language-modeling experiments, one module per family."""
