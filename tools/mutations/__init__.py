"""`tools/mutate`: seeded faults, and the tests that kill them."""
