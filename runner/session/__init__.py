"""A job on its devices: what every mode needs."""
