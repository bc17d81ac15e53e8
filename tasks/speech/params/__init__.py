"""Speech experiments, one module per data set."""
