"""Generation: samplers and the loop that uses them."""
