"""Build macros, checks and command lines."""
