"""Forms of computations in which XLA:CPU is fast; other platforms skip them."""
