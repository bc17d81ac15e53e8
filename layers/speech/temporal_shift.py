"""Temporal shifting: moves signals along time by a random number of positions.

  y[t] = x[t + shift], zero where there is no x

with a separate shift for each example, uniform in [-max_shift, max_shift]. An
augmentation of audio; it has no parameters.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paxon.sharding import checks

_STREAM = "dropout"


class TemporalShift(nn.Module):
  """Shifts the examples of a batch in training.

  Attributes:
    max_shift: Largest shift in positions: seconds times the rate of samples or
      frames. 0 does not shift.
  """

  max_shift: int

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_non_negative(self, "max_shift")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch time *features"],
    mask: Bool[Array, "batch time"] | None = None,
    *,
    deterministic: bool = True,
  ) -> tuple[Float[Array, "batch time *features"], Bool[Array, "batch time"]]:
    """Returns the shifted signals, and True where they are real.

    Args:
      x: Signals, zero where masked.
      mask: True for real positions; `None` is all.
      deterministic: False (training) shifts; it needs the random stream
        `dropout`.

    Raises:
      ValueError: A shift could remove a whole signal.
    """
    if mask is None:
      mask = jnp.ones(x.shape[:2], bool)
    if deterministic or not self.max_shift:
      return x, mask
    length = x.shape[1]
    if self.max_shift >= length:
      raise ValueError(
        f"TemporalShift.max_shift ({self.max_shift}) must be less than the"
        f" {length} positions of the signals."
      )
    key = self.make_rng(_STREAM)
    limit = self.max_shift
    shifts = jax.random.randint(key, x.shape[:1], -limit, limit + 1)
    places = jnp.arange(length)[None] + shifts[:, None]
    inside = (places >= 0) & (places < length)
    index = jnp.clip(places, 0, length - 1)
    shape = (*index.shape, *(1,) * (x.ndim - 2))
    y = jnp.take_along_axis(x, index.reshape(shape), axis=1)
    y = jnp.where(inside.reshape(shape), y, jnp.zeros((), x.dtype))
    return y, jnp.take_along_axis(mask, index, axis=1) & inside
