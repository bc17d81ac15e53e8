"""Hugging Face models of images and sound."""
