"""Concatenate-and-split packing of token runs into rows.

The targets of all runs, one after the other, fill row after row; a run that
does not fit goes on in the next row. For runs `1 a b 2` and `1 c 2` (1 begins
and 2 ends a document) in two rows of four:

    inputs       1 a b 1    c 0 0 0
    targets      a b 2 c    2 0 0 0
    weights      1 1 1 1    1 0 0 0
    positions    0 1 2 0    0 0 0 0
    segment_ids  1 1 1 2    1 0 0 0

The first token of a run is an input only and its last one a target only, so
nothing is predicted from another document, and a run that is split loses no
target: `c`, the last target above, is the first input below. What comes first
in a row has segment 1 and position 0, because a model sees nothing before it.
Only the end of the stream leaves places empty.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def pack_rows(
  runs: Sequence[npt.NDArray[np.int32]],
  *,
  num_rows: int,
  length: int,
  pad_id: int = 0,
) -> dict[str, np.ndarray]:
  """Packs runs of tokens into rows.

  Args:
    runs: Each of two tokens or more; n tokens give n - 1 targets.
    num_rows: The rows to return.
    length: The places in a row.
    pad_id: The input and target of an empty place.

  Returns:
    `inputs` and `targets` int32, `weights` float32 (1 for a target, 0 for an
    empty place), `positions` int32 (from 0 in each segment) and `segment_ids`
    int32 (from 1 in each row, 0 for an empty place), all [num_rows, length].

  Raises:
    ValueError: The runs have too many targets, or one has none.
  """
  counts = np.array([len(run) - 1 for run in runs], np.int64)
  if (counts < 1).any():
    raise ValueError(
      "Every run of tokens must have at least 2 tokens (one target), got runs"
      f" of {sorted({len(run) for run in runs})[:5]}."
    )
  total = int(counts.sum())
  if total > num_rows * length:
    raise ValueError(
      f"{total} targets do not fit in {num_rows} rows of {length}."
    )

  def filled(parts: Sequence[np.ndarray], fill: int) -> np.ndarray:
    flat = np.full(num_rows * length, fill, np.int32)
    if parts:
      flat[:total] = np.concatenate(parts)
    return flat.reshape(num_rows, length)

  # Counted over the whole batch first; empty places form a segment of their
  # own, which keeps `start` below correct for them.
  run_numbers = filled([np.repeat(np.arange(len(runs)), counts)], len(runs))
  is_filled = run_numbers < len(runs)
  column = np.arange(length, dtype=np.int32)
  is_start = np.ones((num_rows, length), bool)
  is_start[:, 1:] = run_numbers[:, 1:] != run_numbers[:, :-1]
  start = np.maximum.accumulate(np.where(is_start, column, 0), axis=1)
  segments = run_numbers - run_numbers[:, :1] + 1
  return {
    "inputs": filled([run[:-1] for run in runs], pad_id),
    "targets": filled([run[1:] for run in runs], pad_id),
    "weights": is_filled.astype(np.float32),
    "positions": np.where(is_filled, column - start, 0).astype(np.int32),
    "segment_ids": np.where(is_filled, segments, 0).astype(np.int32),
  }
