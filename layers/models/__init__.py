"""Models assembled from layers."""
