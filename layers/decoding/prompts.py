"""Prompts of several lengths as one rectangular batch."""

from collections.abc import Sequence
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
  """Prompts, padded on the right.

  Attributes:
    ids: int32 [B, P]; 0 beyond the length of a row.
    lengths: int32 [B], each at least 1.
  """

  ids: np.ndarray
  lengths: np.ndarray


def right_padded(
  prompts: Sequence[Sequence[int]], *, length: int | None = None
) -> Prompts:
  """Returns the batch of `prompts`.

  Args:
    prompts: Ids of each prompt.
    length: Width of the batch; by default that of the longest prompt. A fixed
      width avoids one compilation per longest prompt.

  Raises:
    ValueError: There is no prompt, one is empty, or one exceeds `length`.
  """
  if not prompts:
    raise ValueError("At least one prompt is needed, got none.")
  lengths = [len(prompt) for prompt in prompts]
  width = max(lengths) if length is None else length
  ids = np.zeros((len(prompts), width), np.int32)
  for row, prompt in enumerate(prompts):
    if not prompt:
      raise ValueError(
        f"Prompt {row} is empty; begin it with at least one id, such as the "
        "begin-of-document id."
      )
    if len(prompt) > width:
      raise ValueError(
        f"Prompt {row} has {len(prompt)} ids, more than length ({width})."
      )
    ids[row, : len(prompt)] = prompt
  return Prompts(ids=ids, lengths=np.asarray(lengths, np.int32))
