"""Language models and their data."""
