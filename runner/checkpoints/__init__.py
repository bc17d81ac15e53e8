"""Checkpoints: asynchronous, atomic, named logically, for any mesh."""
