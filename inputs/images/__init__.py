"""Labelled images: files, batches and augmentation."""
