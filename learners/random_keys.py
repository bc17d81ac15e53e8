"""Random keys that are derived, never stored.

The key of a stream is a function of the run's seed, the step and the stream's
name. Nothing is saved in a checkpoint and nothing is lost on resume.
"""

import zlib

import jax
from jax.typing import ArrayLike


def key_for(seed: int, *, step: ArrayLike, stream: str) -> jax.Array:
  """Returns the random key of one stream at one step.

  Args:
    seed: Of the run.
    step: Integer scalar, traced or not.
    stream: Such as "dropout".

  Returns:
    A scalar typed key.
  """
  # The implementation is named, so that a user's default cannot change a run.
  key = jax.random.key(seed, impl="threefry2x32")
  # crc32 and not hash(): Python's differs from process to process.
  return jax.random.fold_in(
    jax.random.fold_in(key, step), zlib.crc32(stream.encode())
  )
