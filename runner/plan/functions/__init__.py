"""Step-time estimate: a simulation with calibrated rates."""
