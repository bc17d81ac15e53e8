"""Metrics that layers record, such as the size of activations.

A layer calls `summaries.summarize(self, "rms", value)`. Training writes the
values as `summaries/<path of the module>/<name>`, with an index for layers of a
stack, as in `summaries/stack/layers/3/attention/rms`.

Values are sown into a separate collection, so they pass through scan,
rematerialization and microbatches. If the collection is not mutable, as in
evaluation and decoding, XLA removes their computation. Training computes them
in every step and transfers them only when summaries are written.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

COLLECTION = "summaries"


def summarize(module: nn.Module, name: str, value: ArrayLike) -> None:
  """Records a scalar of any real dtype; values of several calls are averaged.

  The name is distinct from parameters and submodules of the bound layer. No
  gradient flows through the value.

  Raises:
    ValueError: The value is not a scalar.
  """
  value = jnp.asarray(value)
  if value.ndim:
    raise ValueError(
      f"The summary {name!r} of {type(module).__name__} must be a scalar, such"
      f" as the mean of an array, got shape {value.shape}."
    )
  # Otherwise they would become variables of the model.
  if not module.is_initializing():
    value = jax.lax.stop_gradient(value.astype(jnp.float32))
    module.sow(COLLECTION, name, value)
