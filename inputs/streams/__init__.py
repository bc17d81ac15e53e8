"""Orders in which examples are read."""
