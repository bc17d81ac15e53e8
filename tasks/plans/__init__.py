"""Golden plans: what experiments take on hardware, as files to compare with."""
