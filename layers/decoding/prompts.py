"""Batches of prompts of different lengths."""

from collections.abc import Sequence
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
  """Prompts padded on the right.

  Attributes:
    ids: int32 [B, P]; padded with 0.
    lengths: int32 [B], each at least 1.
  """

  ids: np.ndarray
  lengths: np.ndarray


def pad_right(
  prompts: Sequence[Sequence[int]], *, length: int | None = None
) -> Prompts:
  """Returns a batch of prompts, padded to the longest one or to `length`.

  A fixed length avoids recompilation.

  Raises:
    ValueError: There is no prompt, a prompt is empty, or exceeds `length`.
  """
  if not prompts:
    raise ValueError("prompts must not be empty.")
  lengths = [len(prompt) for prompt in prompts]
  width = max(lengths) if length is None else length
  ids = np.zeros((len(prompts), width), np.int32)
  for index, prompt in enumerate(prompts):
    if not prompt:
      raise ValueError(
        f"Prompt {index} is empty; begin it with an id such as the "
        "begin-of-document id."
      )
    if len(prompt) > width:
      raise ValueError(
        f"Prompt {index} has {len(prompt)} ids, more than length ({width})."
      )
    ids[index, : len(prompt)] = prompt
  return Prompts(ids=ids, lengths=np.asarray(lengths, np.int32))
