"""The rows of a batch as microbatches, and back.

Microbatch `i` of M has the rows i, i + M, ..., as those of a learner: each
device's rows are spread over all microbatches, and no row changes its device.
While streaming, the rows are first cut into one run for each stage, and each
run into M / P microbatches in that way; so a batch that is sharded over the
stages, too, stays where it is.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """Which rows are in which microbatch.

  Attributes:
    num_microbatches: M.
    num_runs: Runs of neighbouring rows that are cut apart; divides M.
  """

  num_microbatches: int
  num_runs: int = 1

  @property
  def each(self) -> int:
    """Microbatches of a run."""
    return self.num_microbatches // self.num_runs

  def apart(self, x: jax.Array) -> jax.Array:
    """Returns [runs,rows,each,...] of an array [batch,...]; moves nothing."""
    return x.reshape(self.num_runs, -1, self.each, *x.shape[1:])

  def together(self, x: jax.Array) -> jax.Array:
    """Undoes `apart`."""
    return x.reshape(-1, *x.shape[3:])

  def split(self, tree: Any) -> Any:
    """Returns arrays [runs,each,rows,...] of arrays [batch,...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(self.apart(x), 2, 1), tree)

  def merge(self, tree: Any) -> Any:
    """Undoes `split`."""
    return jax.tree.map(lambda x: self.together(jnp.moveaxis(x, 1, 2)), tree)

  def merge_flat(self, x: jax.Array) -> jax.Array:
    """Returns [batch,...] of an array [M,rows,...]."""
    return self.merge(x.reshape(self.num_runs, self.each, *x.shape[1:]))


def number(
  rows: int,
  *,
  num_microbatches: int | None,
  microbatch_size: int | None,
  shards: int,
  shrink: bool,
) -> int:
  """Returns into how many microbatches a batch is cut.

  Args:
    rows: Of the batch.
    num_microbatches: How many are asked for, or None.
    microbatch_size: How many rows each is to have, or None.
    shards: Into how many parts the mesh splits the rows of a microbatch.
    shrink: Whether fewer microbatches will do where these do not divide the
      rows, or the shards not the rows of each: as many as can be, or one.

  Raises:
    ValueError: They do not divide the rows.
  """
  if microbatch_size is None:
    assert num_microbatches is not None
    wanted, field = num_microbatches, "num_microbatches"
    fits = rows % wanted == 0
  else:
    wanted, field = -(-rows // microbatch_size), "microbatch_size"
    fits = rows % microbatch_size == 0
  if shrink:

    def divides(n: int) -> bool:
      # A microbatch of one row stays whole.
      return rows % n == 0 and (rows == n or rows // n % shards == 0)

    return max(filter(divides, range(1, min(wanted, rows) + 1)), default=1)
  if fits:
    return wanted
  value = num_microbatches if microbatch_size is None else microbatch_size
  raise ValueError(
    f"PipelinedStack.{field} ({value}) must divide the {rows} rows of the"
    f" batch; use {_divisors(rows)}."
  )


def _divisors(rows: int) -> str:
  found = [n for n in range(1, rows + 1) if rows % n == 0]
  shown = ", ".join(str(n) for n in found[:8])
  return shown + (", ..." if len(found) > 8 else "")
