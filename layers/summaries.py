"""Metrics that layers record, such as the size of activations.

A layer calls `summaries.summarize(self, "rms", value)`. Training writes the
values as `summaries/<path of the module>/<name>`, with an index for layers of a
stack, as in `summaries/stack/layers/3/attention/rms`. `record_histogram` and
`record_image` do the same for arrays, which TensorBoard shows.

Values are sown into separate collections, one for each level, so they pass
through scan, rematerialization and microbatches. If a collection is not
mutable, as in evaluation and decoding, XLA removes the computation of its
values. Training computes those up to `observability.summary_level` in every
step and transfers them only when summaries are written.
"""

from typing import Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Real

COLLECTION = "summaries"
# By level.
COLLECTIONS = (COLLECTION, f"{COLLECTION}_1", f"{COLLECTION}_2")
# Ends of the names of arrays.
HISTOGRAM: Final = ":histogram"
IMAGE: Final = ":image"
# Upper limits of the bins of a histogram, without the last one, which has none.
_POWERS = tuple(2.0**exponent for exponent in range(-16, 16))
LIMITS: Final = (*(-each for each in reversed(_POWERS)), 0.0, *_POWERS)
_MAX_SIZE = 1024


def num_dimensions(name: str) -> int:
  """Returns the dimensions of the values of a summary."""
  if name.endswith(HISTOGRAM):
    return 1
  return 3 if name.endswith(IMAGE) else 0


def summarize(
  module: nn.Module, name: str, value: ArrayLike, *, level: int = 0
) -> None:
  """Records a scalar of any real dtype; values of several calls are averaged.

  The name is distinct from parameters and submodules of the bound layer. No
  gradient flows through the value.

  Args:
    module: The layer that records it.
    name: Its name in the layer.
    value: A scalar.
    level: 0 is always recorded in training, 1 and 2 only if
      `observability.summary_level` is at least as high.

  Raises:
    ValueError: The value is not a scalar, or the level does not exist.
  """
  _check_level(module, name, level)
  value = jnp.asarray(value)
  if value.ndim:
    raise ValueError(
      f"The summary {name!r} of {type(module).__name__} must be a scalar, such"
      f" as the mean of an array, got shape {value.shape}."
    )
  _sow(module, name, value, level)


def record_histogram(
  module: nn.Module, name: str, values: Real[Array, "..."], *, level: int = 1
) -> None:
  """Records the distribution of the values of an array.

  The bins are fixed, so that the counts of microbatches and devices add up:
  powers of 2 of both signs from 2**-16 to 2**15. NaN is not counted. It reads
  the array once for each bin, in every step, so it belongs to a high level.

  Args:
    module: The layer that records it.
    name: Its name in the layer.
    values: An array of any shape.
    level: See `summarize`.

  Raises:
    ValueError: The level does not exist.
  """
  _check_level(module, name, level)
  _sow(module, name + HISTOGRAM, _count(jax.lax.stop_gradient(values)), level)


def record_image(
  module: nn.Module,
  name: str,
  image: Float[Array, "height width *channels"],
  *,
  level: int = 1,
) -> None:
  """Records an image, such as the mean attention of a batch.

  Images of several calls and microbatches are averaged.

  Args:
    module: The layer that records it.
    name: Its name in the layer.
    image: Values from 0 to 1, [H,W], [H,W,1] or [H,W,3], with H and W up to
      1024.
    level: See `summarize`.

  Raises:
    ValueError: The shape is another one, or the level does not exist.
  """
  _check_level(module, name, level)
  shape = image.shape
  if (
    len(shape) not in (2, 3)
    or max(shape[:2]) > _MAX_SIZE
    or shape[2:] not in ((), (1,), (3,))
  ):
    raise ValueError(
      f"The image {name!r} of {type(module).__name__} must be [height, width],"
      f" or with 1 or 3 channels, at most {_MAX_SIZE} wide and high, got shape"
      f" {shape}."
    )
  image = image if len(shape) == 3 else image[..., None]
  _sow(module, name + IMAGE, image, level)


def count(mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
  """Counts without an overflow of int32, and nearly exactly in float32."""
  lines = jnp.sum(mask, axis=-1, dtype=jnp.int32)
  return jnp.sum(lines.astype(jnp.float32))


def _check_level(module: nn.Module, name: str, level: int) -> None:
  if not 0 <= level < len(COLLECTIONS):
    raise ValueError(
      f"The level of the summary {name!r} of {type(module).__name__} must be"
      f" from 0 to {len(COLLECTIONS) - 1}, got {level}."
    )


def _sow(module: nn.Module, name: str, value: jax.Array, level: int) -> None:
  # Otherwise they would become variables of the model.
  if not module.is_initializing():
    value = jax.lax.stop_gradient(value.astype(jnp.float32))
    module.sow(COLLECTIONS[level], name, value)


def _count(values: jax.Array) -> jax.Array:
  """Returns counts [bins], the sum and the sum of squares of finite values."""
  x = jnp.atleast_1d(values).astype(jnp.float32)
  # One limit after the other: all at once would need an array for each.
  limits = jnp.asarray(LIMITS, jnp.float32)
  below = jax.lax.map(lambda limit: count(x <= limit), limits)
  ends = jnp.stack([jnp.float32(0), count(~jnp.isnan(x))])
  counts = jnp.diff(jnp.concatenate([ends[:1], below, ends[1:]]))
  kept = jnp.where(jnp.isfinite(x), x, 0.0)
  sums = jnp.stack([jnp.sum(kept), jnp.sum(kept**2)])
  return jnp.concatenate([counts, sums])
