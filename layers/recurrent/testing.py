"""Packed batches and decoding checks shared by tests of recurrent layers."""

from collections.abc import Sequence
from typing import Any
import zlib

import jax
import numpy as np

from paxon.layers import testing


def decode(
  layer: Any, values: Any, x: Any, segments: Any, splits: Sequence[int]
) -> Any:
  """Returns the outputs of calls with the tokens between `splits`.

  The first call is the prefill.
  """
  begin, outputs, state = 0, [], {}
  x, segments = np.asarray(x), np.asarray(segments)
  for end in [*splits, x.shape[1]]:
    # One program for all steps of a length, whatever the splits.
    y, state = testing.apply(
      layer,
      {**values, **state},
      *testing.in_context(
        x[:, begin:end],
        None,
        segments[:, begin:end],
        cache_length=None if begin else x.shape[1],
      ),
      mutable=["cache"],
    )
    outputs.append(np.asarray(y))
    begin = end
  return np.concatenate(outputs, axis=1)


def segments(*rows: str) -> jax.Array:
  """Returns segment ids, a digit for each token."""
  return testing.array([[int(c) for c in row] for row in rows], np.int32)


# Cases of `make_goldens`: the class, and the width of its projection.
EMBED, HIDDEN = 5, 6
TORCH_CASES = {
  "lstm": ("lstm", None),
  "projected": ("lstm", 4),
  "gru": ("gru", None),
}


def torch_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns the float64 values of a parameter of PyTorch's layers."""
  random = np.random.RandomState(zlib.crc32(name.encode()))
  return 0.6 * random.standard_normal(shape)


def torch_input() -> np.ndarray:
  """Returns the tokens of the cases, float64 [2,9,EMBED]."""
  return torch_weight("input", (2, 9, EMBED))
