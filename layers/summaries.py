"""Metrics that layers record, such as the size of activations.

A layer calls `summaries.summarize(self, "rms", value)`. Training writes the
values as `summaries/<path of the module>/<name>`, with an index for layers of a
stack, as in `summaries/stack/layers/3/attention/rms`.

Values are sown into separate collections, one for each level, so they pass
through scan, rematerialization and microbatches. If a collection is not
mutable, as in evaluation and decoding, XLA removes the computation of its
values. Training computes those up to `observability.summary_level` in every
step and transfers them only when summaries are written.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

COLLECTION = "summaries"
# By level.
COLLECTIONS = (COLLECTION, f"{COLLECTION}_1", f"{COLLECTION}_2")


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
  if not 0 <= level < len(COLLECTIONS):
    raise ValueError(
      f"The level of the summary {name!r} of {type(module).__name__} must be"
      f" from 0 to {len(COLLECTIONS) - 1}, got {level}."
    )
  value = jnp.asarray(value)
  if value.ndim:
    raise ValueError(
      f"The summary {name!r} of {type(module).__name__} must be a scalar, such"
      f" as the mean of an array, got shape {value.shape}."
    )
  # Otherwise they would become variables of the model.
  if not module.is_initializing():
    value = jax.lax.stop_gradient(value.astype(jnp.float32))
    module.sow(COLLECTIONS[level], name, value)
