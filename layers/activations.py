"""Activations that `flax.linen` lacks, soft cap, and activations by name.

Fields take the function itself (`activation=nn.silu`); `find` looks up names in
text.

  squared_relu(x) = max(x, 0) ** 2     (Primer, https://arxiv.org/abs/2109.08668)
  cubed_relu(x)   = max(x, 0) ** 3
  sine_relu(x)    = sin(max(x, 0))
  soft_cap(x)     = cap * tanh(x / cap)
"""

from collections.abc import Callable, Mapping
import types
from typing import Final

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.sharding import suggestions

Activation = Callable[[jax.Array], jax.Array]


def squared_relu(x: jax.Array) -> jax.Array:
  """Returns `max(x, 0) ** 2`."""
  x = nn.relu(x)
  return x * x


def cubed_relu(x: jax.Array) -> jax.Array:
  """Returns `max(x, 0) ** 3`."""
  x = nn.relu(x)
  return x * x * x


def sine_relu(x: jax.Array) -> jax.Array:
  """Returns `sin(max(x, 0))`."""
  return jnp.sin(nn.relu(x))


def gelu_sigmoid(x: jax.Array) -> jax.Array:
  """Returns `x * sigmoid(1.702 * x)`, known as quick GELU."""
  return x * nn.sigmoid(1.702 * x)


def gelu_exact(x: jax.Array) -> jax.Array:
  """Returns `x` times the normal cumulative distribution function of `x`."""
  return nn.gelu(x, approximate=False)


def gelu_tanh(x: jax.Array) -> jax.Array:
  """Returns the tanh approximation of `gelu_exact`."""
  return nn.gelu(x, approximate=True)


def identity(x: jax.Array) -> jax.Array:
  """Returns `x`."""
  return x


NAMED: Final[Mapping[str, Activation]] = types.MappingProxyType(
  {
    "cubed_relu": cubed_relu,
    "elu": nn.elu,
    "exp": jnp.exp,
    "gelu_exact": gelu_exact,
    "gelu_sigmoid": gelu_sigmoid,
    "gelu_tanh": gelu_tanh,
    "identity": identity,
    "leaky_relu": nn.leaky_relu,
    "relu": nn.relu,
    "relu6": nn.relu6,
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
    "sine_relu": sine_relu,
    "softplus": nn.softplus,
    "squared_relu": squared_relu,
    "swish": nn.silu,
    "tanh": nn.tanh,
  }
)


def find(name: str) -> Activation:
  """Returns an activation by name, ignoring case and underscores.

  The same name gives the same object, so modules made with it compare equal.

  Raises:
    ValueError: The name is unknown, or `gelu`, which is ambiguous.
  """
  plain = {key.replace("_", ""): value for key, value in NAMED.items()}
  wanted = name.lower().replace("_", "")
  if wanted == "gelu":
    raise ValueError(
      f"The activation {name!r} is ambiguous: 'gelu_exact' (Hugging Face's "
      "gelu) or 'gelu_tanh' (Pax's and JAX's gelu)."
    )
  if wanted not in plain:
    close = suggestions.find_closest(name, NAMED, count=3) or sorted(NAMED)
    raise ValueError(f"Unknown activation {name!r}; use {', '.join(close)}.")
  return plain[wanted]


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
  """Returns `x` soft-capped to `(-cap, cap)`, in its own dtype.

  Unlike clipping it keeps gradients. Used on logits by Gemma 2 (2024,
  https://arxiv.org/abs/2408.00118, section 2).
  """
  return cap * jnp.tanh(x / cap)
