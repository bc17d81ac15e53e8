"""From an experiment's name and a command line to a resolved configuration."""
