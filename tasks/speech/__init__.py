"""Base class of experiments that recognize speech, and their data."""
