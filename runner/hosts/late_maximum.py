"""The largest number that any process of a run has, without waiting for it."""

import jax
import jax.numpy as jnp

from paxon.sharding import arrays
from paxon.sharding import layout as layouts


class LateMaximum:
  """The largest of all processes' numbers, known one call later.

  A call adds a small computation behind those under way and waits for the one
  of the call before, which the step after it has given time: no device is ever
  without work.
  """

  def __init__(self, layout: layouts.Layout) -> None:
    """Prepares; the first call compiles.

    Args:
      layout: Whose devices are used.
    """
    self._place = arrays.on_each_device(layout)
    self._largest = layout.jit(jnp.max, out_shardings=layout.replicated)
    self._pending: jax.Array | None = None

  def __call__(self, number: int) -> int:
    """Returns the largest number of the call before; 0 at the first one.

    Args:
      number: Of this process, not negative, int32.
    """
    before = self._pending
    self._pending = self._largest(self._place(number))
    return 0 if before is None else int(before)
