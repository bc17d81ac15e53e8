"""The plan: what an experiment will cost on hardware that is not here."""
