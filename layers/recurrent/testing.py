"""Packed batches and decoding checks shared by tests of recurrent layers."""

from collections.abc import Sequence
from typing import Any

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
