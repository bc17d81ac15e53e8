"""Figures that layers tell about themselves, such as the size of activations.

A layer calls `summaries.summarize(self, "rms", value)`. Training collects the
values and writes them as `summaries/<path of the module>/<name>`; the layers of
a stack keep their number, as in `summaries/stack/layers/3/attention/rms`.

They are linen's sown values in a collection of their own, so they pass through
scan, rematerialization and microbatches. Where the collection is not mutable,
in evaluation and decoding, the compiler drops what only they need. Training
computes them in every step and moves them to the host in steps whose summaries
are written.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

COLLECTION = "summaries"


def summarize(module: nn.Module, name: str, value: ArrayLike) -> None:
  """Records a scalar; values of several calls are averaged.

  Args:
    module: The layer that speaks, bound.
    name: Of the value, unlike those of the module's parameters and children.
    value: A scalar of any real dtype. No gradient passes through it.

  Raises:
    ValueError: The value is no scalar.
  """
  value = jnp.asarray(value)
  if value.ndim:
    raise ValueError(
      f"The summary {name!r} of {type(module).__name__} must be a scalar, such"
      f" as the mean of an array, got the shape {value.shape}."
    )
  # Initial values would make them variables of the model.
  if not module.is_initializing():
    value = jax.lax.stop_gradient(value.astype(jnp.float32))
    module.sow(COLLECTION, name, value)
