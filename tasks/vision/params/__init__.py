"""Image experiments, one module per data set."""
