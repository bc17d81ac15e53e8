"""Transcribed audio: files, labels, and batches with an exact position."""
