"""AdamW with moments in 8 bits, quantized in blocks.

The update is that of `adamw`. Between updates, each block of 256 consecutive
elements of a moment is stored as indices of uint8 into a table of 256 values,
times the largest absolute value of the block. The tables have more values near
zero: the dynamic tree quantization of Dettmers et al. 2022
(https://arxiv.org/abs/2110.02861) as in bitsandbytes, signed for m and unsigned
for v. A small variable keeps float32 moments.

A moment is sharded like its parameter. The scales, a float32 for each block,
are sharded over layers only. If the last dimension is not a multiple of 256,
blocks lie across rows, and a sharded moment is gathered for each update.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import optimizer
from paxon.sharding import checks

BLOCK_SIZE = 256
_EXPONENTS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam8Bit:
  """AdamW with 8-bit moments.

  Attributes:
    schedule: Maps a step to a learning rate.
    b1: Decay of the mean of gradients.
    b2: Decay of the mean of squared gradients.
    epsilon: Added to the root of the mean of squared gradients.
    min_size: Smallest number of elements of one layer of a variable whose
      moments are quantized.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
  """

  schedule: optax.Schedule
  b1: float = 0.9
  b2: float = 0.999
  epsilon: float = 1e-8
  min_size: int = 4096
  weight_decay: float = 0.0

  def __post_init__(self) -> None:
    checks.check_decay(self, "b1", "b2")
    checks.check_positive(self, "epsilon", "min_size")
    checks.check_non_negative(self, "weight_decay")

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule.

    `specs` None decays all variables and treats none as stacked.
    """
    return optimizer.descent(
      self._direction(specs),
      schedule=self.schedule,
      weight_decay=self.weight_decay,
      specs=specs,
    )

  def _direction(
    self, specs: variable_groups.Specs | None
  ) -> optax.GradientTransformation:
    """Returns the transformation from g to Adam's direction."""

    def find_depths(tree: Any) -> list[int | None]:
      """Returns the number of stacked axes, None for a small variable."""
      depths = optimizer.find_depths(tree, specs)
      return [
        depth if np.prod(x.shape[depth:]) >= self.min_size else None
        for x, depth in zip(jax.tree.leaves(tree), depths, strict=True)
      ]

    def init(p: jax.Array, depth: int | None) -> tuple[jax.Array, ...]:
      zeros = jnp.zeros(p.shape, jnp.float32)
      return (
        *quantize(zeros, depth=depth, signed=True),
        *quantize(zeros, depth=depth, signed=False),
      )

    def update(
      g: jax.Array, old: Adam8BitState, depth: int | None
    ) -> tuple[jax.Array, Adam8BitState]:
      number = jnp.asarray(optax.safe_increment(old.count), jnp.float32)
      mean = dequantize(old.mean, old.mean_scale, depth=depth, signed=True)
      square = dequantize(
        old.square, old.square_scale, depth=depth, signed=False
      )
      mean = self.b1 * mean + (1 - self.b1) * g
      square = self.b2 * square + (1 - self.b2) * jnp.square(g)
      root = jnp.sqrt(square / (1 - self.b2**number))
      direction = mean / (1 - self.b1**number) / (root + self.epsilon)
      return direction, Adam8BitState(
        old.count,
        *quantize(mean, depth=depth, signed=True),
        *quantize(square, depth=depth, signed=False),
      )

    return optimizer.make_per_variable(
      Adam8BitState, find=find_depths, init=init, update=update
    )


class Adam8BitState(NamedTuple):
  """Quantized moments; each tree has the structure of the parameters.

  Attributes:
    count: int32 scalar, the number of updates.
    mean: uint8 indices of m; float32 m of a small variable.
    mean_scale: float32 scales of blocks; size one for a small variable.
    square: uint8 indices of v; float32 v of a small variable.
    square_scale: As `mean_scale`.
  """

  count: Any
  mean: Any
  mean_scale: Any
  square: Any
  square_scale: Any


def quantize(
  x: jax.Array, *, depth: int | None, signed: bool
) -> tuple[jax.Array, jax.Array]:
  """Returns uint8 indices with the shape of `x`, and the scales of blocks.

  Args:
    x: float32 array.
    depth: Number of leading axes that blocks do not cross; None does not
      quantize and returns `x`.
    signed: Whether negative values can be stored.
  """
  if depth is None:
    return x, jnp.ones((1,) * x.ndim, jnp.float32)
  blocks = _to_blocks(x, depth)
  scale = jnp.max(jnp.abs(blocks), axis=-1)
  scale = jnp.where(scale > 0, scale, 1.0)
  values = make_table(signed)
  middles = jnp.asarray((values[1:] + values[:-1]) / 2)
  index = jnp.searchsorted(middles, blocks / scale[..., None])
  return _from_blocks(index.astype(jnp.uint8), x.shape, depth), scale


def dequantize(
  index: jax.Array, scale: jax.Array, *, depth: int | None, signed: bool
) -> jax.Array:
  """Returns the values of `quantize`, float32."""
  if depth is None:
    return index
  values = jnp.asarray(make_table(signed))
  blocks = values[_to_blocks(index, depth)] * scale[..., None]
  return _from_blocks(blocks, index.shape, depth)


@functools.cache
def make_table(signed: bool) -> np.ndarray:
  """Returns the 256 values of the quantization, increasing, float32.

  With e from 0 to 6, they are the middles of 2^e (twice as many if unsigned)
  equal parts of [0.1, 1], times 10^(e - 6), with both signs if signed; and 0
  and 1.
  """
  found = [0.0, 1.0]
  for exponent in range(_EXPONENTS):
    edges = np.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
    middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent + 1 - _EXPONENTS)
    found += [*middles, *(-middles if signed else ())]
  return np.sort(np.asarray(found, np.float32))


def _to_blocks(x: jax.Array, depth: int) -> jax.Array:
  """Returns [..., blocks, BLOCK_SIZE], of the flat layer padded with zeros."""
  if x.shape[-1] % BLOCK_SIZE == 0:
    # The same blocks, without a reshape of sharded dimensions.
    return x.reshape(*x.shape[:-1], -1, BLOCK_SIZE)
  flat = x.reshape(*x.shape[:depth], -1)
  pads = [(0, 0)] * depth + [(0, -flat.shape[-1] % BLOCK_SIZE)]
  return jnp.pad(flat, pads).reshape(*x.shape[:depth], -1, BLOCK_SIZE)


def _from_blocks(
  blocks: jax.Array, shape: tuple[int, ...], depth: int
) -> jax.Array:
  if shape[-1] % BLOCK_SIZE == 0:
    return blocks.reshape(shape)
  flat = blocks.reshape(*shape[:depth], -1)
  return flat[..., : int(np.prod(shape[depth:]))].reshape(shape)
