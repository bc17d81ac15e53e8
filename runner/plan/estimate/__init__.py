"""How long a step takes, by simulation with measured rates."""
