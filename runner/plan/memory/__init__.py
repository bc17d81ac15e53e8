"""Memory of a training step in closed form, from its jaxpr; no compiler."""
