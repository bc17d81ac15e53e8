"""The bench: pairs of contenders timed in turn, and hand-written baselines."""
