"""Learned scale and bias of norms.

Norms with it have the fields `use_scale`, `scale_init`, `scale_offset` and
`param_dtype`. The stored parameter is the scale minus `scale_offset`: with an
offset of one (Gemma, Pax) it starts at zero, and weight decay pulls the scale
to one.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.sharding import axes, logical


@runtime_checkable
class Scaled(Protocol):
  """A bound norm with these fields."""

  use_scale: bool
  scale_init: nn.initializers.Initializer
  scale_offset: float
  param_dtype: DTypeLike

  def param(self, name: str, init_fn: Any, *args: Any) -> Any:
    """Creates or reads a parameter, like `nn.Module.param`."""


@runtime_checkable
class Biased(Scaled, Protocol):
  """A bound norm that may have a bias."""

  use_bias: bool
  bias_init: nn.initializers.Initializer


@dataclasses.dataclass(frozen=True)
class StoredInit:
  """Initializer of the stored parameter; compares by value.

  Attributes:
    init: Initializer of the scale.
    offset: Subtracted from it.
  """

  init: nn.initializers.Initializer
  offset: float

  def __call__(
    self, key: jax.Array, shape: Sequence[int], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the initial stored value."""
    return self.init(key, shape, dtype) - jnp.asarray(self.offset, dtype)


def make_scale(norm: Scaled, size: int, axis: str | None) -> jax.Array | None:
  """Creates the stored parameter [size]; None if the norm has no scale."""
  if not norm.use_scale:
    return None
  init = norm.scale_init
  if norm.scale_offset:
    init = StoredInit(init, norm.scale_offset)
  return norm.param(
    "scale", logical.partitioned(init, (axis,)), (size,), norm.param_dtype
  )


def make_bias(
  norm: Biased, size: int, axis: str = axes.EMBED
) -> jax.Array | None:
  """Creates the bias [size]; None if the norm has none."""
  if not norm.use_bias:
    return None
  init = logical.partitioned(norm.bias_init, (axis,))
  return norm.param("bias", init, (size,), norm.param_dtype)


def apply_scale(
  x: jax.Array,
  scale: jax.Array | None,
  offset: float,
  bias: jax.Array | None = None,
) -> jax.Array:
  """Returns `x * (scale + offset) + bias` along the last axis.

  `x` has normalized values of any rank, in at least float32.
  """
  if scale is not None:
    x = x * to_features(scale, x, offset)
  return x if bias is None else x + to_features(bias, x)


def to_features(
  vector: jax.Array, x: jax.Array, offset: float = 0.0
) -> jax.Array:
  """Returns `vector + offset` in the dtype and with the rank of `x`."""
  # Added after the cast: in bfloat16, 1 + scale would lose the scale.
  vector = vector.astype(x.dtype) + offset
  return vector.reshape((1,) * (x.ndim - 1) + (-1,))
