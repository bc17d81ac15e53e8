"""Packed batches and decoding checks shared by tests of recurrent layers."""

from collections.abc import Sequence
from typing import Any
import zlib

import jax
import numpy as np

from paxon.layers import testing


def decoded(
  layer: Any, values: Any, x: Any, segments: Any, splits: Sequence[int]
) -> Any:
  """Returns the outputs of calls with the tokens between `splits`.

  The first call is the prefill.
  """

  def call(cache_length, variables, x, segments):
    return layer.apply(
      variables,
      x,
      None,
      segments,
      cache_length=cache_length,
      mutable=["cache"],
    )

  # One program for all steps of a length.
  jitted = jax.jit(call, static_argnums=0)
  begin, outputs, state = 0, [], {}
  for end in [*splits, x.shape[1]]:
    y, state = jitted(
      None if begin else x.shape[1],
      {**values, **state},
      x[:, begin:end],
      segments[:, begin:end],
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
