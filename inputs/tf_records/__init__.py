"""Reading and writing TFRecord files without TensorFlow."""
