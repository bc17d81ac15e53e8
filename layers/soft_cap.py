"""Soft cap: `cap * tanh(x / cap)`, which keeps values inside `(-cap, cap)`.

Small values hardly change, and unlike those of a clip the gradients of large
ones do not vanish at once. Used on logits by Gemma 2 (2024,
https://arxiv.org/abs/2408.00118, section 2).
"""

import jax
import jax.numpy as jnp


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
  """Returns `x` bent into `(-cap, cap)`, in its own dtype."""
  return cap * jnp.tanh(x / cap)
