"""The import of checkpoints that Pax wrote."""
