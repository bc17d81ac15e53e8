"""Programs: training, evaluation and decoding of one job."""
