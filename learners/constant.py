"""A learning rate that never changes."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from paxon.learners import field_checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
  """A schedule: called with a step, gives a float32 learning rate.

  Attributes:
    value: The learning rate.
  """

  value: float

  def __post_init__(self) -> None:
    field_checks.not_negative(self, "value")

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns `value`, float32, of the shape of `step`."""
    return jnp.full(jnp.shape(step), self.value, jnp.float32)
