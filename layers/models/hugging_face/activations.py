"""Activations by the names that `config.json` has for them."""

from collections.abc import Callable, Mapping

from flax import linen as nn
import jax

Activation = Callable[[jax.Array], jax.Array]


def gelu_exact(x: jax.Array) -> jax.Array:
  """Returns `x` times the normal distribution function of `x`."""
  return nn.gelu(x, approximate=False)


def gelu_tanh(x: jax.Array) -> jax.Array:
  """Returns the approximation of `gelu_exact` by a hyperbolic tangent."""
  return nn.gelu(x, approximate=True)


def gelu_sigmoid(x: jax.Array) -> jax.Array:
  """Returns the approximation of `gelu_exact` by `x * sigmoid(1.702 x)`."""
  return x * jax.nn.sigmoid(1.702 * x)


def relu_squared(x: jax.Array) -> jax.Array:
  """Returns the square of `relu(x)`."""
  return jax.numpy.square(nn.relu(x))


SERVED: Mapping[str, Activation] = {
  "gelu": gelu_exact,
  "gelu_fast": gelu_tanh,
  "gelu_new": gelu_tanh,
  "gelu_python": gelu_exact,
  "gelu_python_tanh": gelu_tanh,
  "gelu_pytorch_tanh": gelu_tanh,
  "quick_gelu": gelu_sigmoid,
  "relu": nn.relu,
  "relu2": relu_squared,
  "silu": nn.silu,
  "swish": nn.silu,
  "tanh": nn.tanh,
}
