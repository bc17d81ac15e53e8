"""The caches of all layers during a decoding step of a pipeline.

Each stage keeps those of its layers, [R,K,batch,...], for all microbatches, and
in each tick reads and writes the rows of one of them. The rows stay in
the order of the batch, so a cache is the one that a stack would have made.

What has no rows, such as the number of tokens seen, is the same for all
microbatches: each is given the value before the step, and the last one's is
kept.
"""

from collections.abc import Mapping
from typing import Any

from flax import traverse_util
import jax

from paxon.pipeline import microbatch_rows, timetable

# Arrays by path.
Flat = Mapping[tuple[str, ...], jax.Array]


def apart(
  tree: Any, rows: microbatch_rows.Rows, *, batch: int
) -> tuple[Flat, Flat]:
  """Returns what has rows, [P,R,K,runs,rows,each,...], and what has none.

  Args:
    tree: Caches [P,R,K,batch,...], and numbers [P,R,K].
    rows: Which rows are in which microbatch.
    batch: Number of rows.

  Raises:
    ValueError: A variable has no place for each row of the batch.
  """
  with_rows, without = {}, {}
  flat: dict[Any, Any] = traverse_util.flatten_dict(tree)
  for path, x in flat.items():
    if x.ndim == 3:
      without[path] = x
    elif x.shape[3] == batch:
      own = jax.vmap(rows.apart)(x.reshape(-1, *x.shape[3:]))
      with_rows[path] = own.reshape(*x.shape[:3], *own.shape[1:])
    else:
      raise ValueError(
        f"A pipeline cuts caches into microbatches, but cache/{'/'.join(path)}"
        f" of shape {x.shape[3:]} does not begin with the {batch} rows of the"
        " batch."
      )
  return with_rows, without


def together(with_rows: Flat, without: Flat) -> Any:
  """Undoes `apart`."""
  flat = {
    path: x.reshape(*x.shape[:3], -1, *x.shape[6:])
    for path, x in with_rows.items()
  }
  return traverse_util.unflatten_dict({**flat, **without})


def read(
  with_rows: Flat,
  without: Flat,
  work: timetable.Work,
  rows: microbatch_rows.Rows,
) -> Any:
  """Returns the caches that one stage works on, [K,rows,...] and [K].

  Args:
    with_rows: Those of one stage, [R,K,runs,rows,each,...].
    without: What has no rows before the step, [R,K].
    work: Of the stage.
    rows: Which rows are in which microbatch.
  """

  def one(x: jax.Array) -> jax.Array:
    found = jax.lax.dynamic_slice(x, _start(x, work, rows), _sizes(x))
    return found.reshape(x.shape[1], *_row_shape(x))

  flat = {path: one(x) for path, x in {**with_rows, **without}.items()}
  return traverse_util.unflatten_dict(flat)


def write(
  flat: Flat, changed: Any, work: timetable.Work, rows: microbatch_rows.Rows
) -> Flat:
  """Returns variables of one stage with what it changed in its place."""
  new: dict[Any, Any] = traverse_util.flatten_dict(changed)

  def one(x: jax.Array, part: jax.Array) -> jax.Array:
    part = part.reshape(_sizes(x)).astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, part, _start(x, work, rows))

  return {path: one(x, new[path]) for path, x in flat.items()}


def _row_shape(x: jax.Array) -> tuple[int, ...]:
  return () if x.ndim == 2 else (x.shape[3], *x.shape[5:])


def _start(
  x: jax.Array, work: timetable.Work, rows: microbatch_rows.Rows
) -> tuple[Any, ...]:
  first = (work.repeat, 0)
  if x.ndim > 2:
    run, place = divmod(work.microbatch, rows.each)
    first += (run, 0, place)
  return first + (0,) * (x.ndim - len(first))


def _sizes(x: jax.Array) -> tuple[int, ...]:
  if x.ndim == 2:
    return (1, x.shape[1])
  return (1, x.shape[1], 1, x.shape[3], 1, *x.shape[5:])
