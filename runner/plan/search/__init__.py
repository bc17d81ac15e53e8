"""Changes of an experiment: which there are, what they cost, which are best."""
