"""SeqIO's tasks and mixtures as examples, and their metric functions."""
