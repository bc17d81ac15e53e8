"""Text of a trained model."""
