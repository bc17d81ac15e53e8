"""The learned factor per feature that ends a norm.

A norm that uses it has the fields `use_scale`, `scale_init`, `scale_offset` and
`param_dtype`. The factor is the stored parameter `scale` plus `scale_offset`:
with an offset of one (Gemma, Pax) what is stored starts at zero, and weight
decay, where it is asked for, pulls the factor to one.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.sharding import logical


@runtime_checkable
class Scaled(Protocol):
  """A bound norm; see the fields above."""

  use_scale: bool
  scale_init: nn.initializers.Initializer
  scale_offset: float
  param_dtype: DTypeLike

  def param(self, name: str, init_fn: Any, *args: Any) -> Any:
    """Makes or reads a parameter, as linen does."""


@dataclasses.dataclass(frozen=True)
class StoredInit:
  """First value of what is stored, less the offset; equal parts are equal.

  Attributes:
    init: Initializer of the factor.
    offset: What is added to the stored value wherever it is used.
  """

  init: nn.initializers.Initializer
  offset: float

  def __call__(self, key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    """Returns the first stored value."""
    return self.init(key, shape, dtype) - jnp.asarray(self.offset, dtype)


def stored(norm: Scaled, size: int, axis: str | None) -> jax.Array | None:
  """Returns the stored parameter [size], or None where the norm has none."""
  if not norm.use_scale:
    return None
  init = norm.scale_init
  if norm.scale_offset:
    init = StoredInit(init, norm.scale_offset)
  return norm.param(
    "scale", logical.partitioned(init, (axis,)), (size,), norm.param_dtype
  )


def scaled(x: jax.Array, scale: jax.Array | None, offset: float) -> jax.Array:
  """Returns `x` times the factor along its last axis, in the dtype of `x`.

  Args:
    x: What was normalized, of any rank, in at least float32.
    scale: What `stored` returned.
    offset: The norm's `scale_offset`.
  """
  return x if scale is None else x * over_features(scale, x, offset)


def over_features(
  vector: jax.Array, x: jax.Array, offset: float = 0.0
) -> jax.Array:
  """Returns `vector + offset` in the dtype and with the rank of `x`."""
  # Added after the cast: 1 + scale in bfloat16 would round the scale away.
  vector = vector.astype(x.dtype) + offset
  return vector.reshape((1,) * (x.ndim - 1) + (-1,))
