"""Object stores: what TensorStore and tests need to reach them."""
