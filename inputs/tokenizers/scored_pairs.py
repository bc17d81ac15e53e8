"""Pairs of answers with log probabilities that were computed once.

A file `.npz` has for each split, such as `train`,

  <split>/log_probs    float32 [pairs, 2], of the answers by the reference
  <split>/digests      uint32 [pairs], CRC-32 of each pair's tokens and weights
  reference            the name of the reference's values

so that an index means the same pair, and other data or another reference is an
error. Resuming needs nothing more.
"""

from collections.abc import Mapping
import dataclasses
import functools
import os
from typing import Any, Final
import zlib

import numpy as np

from paxon.inputs.sources import example_source

KEY: Final = "reference_log_probs"
_REFERENCE = "reference"
_DIGESTED = ("inputs", "targets", "weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredPairs:
  """Adds the log probabilities of a reference to pairs.

  Attributes:
    pairs: The pairs, `preference_pairs.TokenizedPairs`.
    file: The file with the log probabilities.
    split: Which of its splits the pairs are.
    reference: Name of the reference's values.
  """

  pairs: Any
  file: str
  split: str
  reference: str

  def __post_init__(self) -> None:
    log_probs, _ = self._stored
    if len(log_probs) != len(self.pairs):
      raise ValueError(
        f"{self.file} has log probabilities of {len(log_probs)} pairs of"
        f" {self.split}, and the data has {len(self.pairs)}; compute them"
        " again."
      )

  def __len__(self) -> int:
    return len(self.pairs)

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns the arrays of a pair and `reference_log_probs` float32 [2 T].

    The log probability of an answer is the first entry of its half.

    Raises:
      ValueError: The pair is not that of the file.
    """
    example = self.pairs[index]
    log_probs, digests = self._stored
    if digest(example) != digests[index]:
      raise ValueError(
        f"{self.file} has the log probability of another pair {index} of"
        f" {self.split}: the data, the tokenizer, the chat template or length"
        " has changed; compute them again."
      )
    values = np.zeros(len(example["inputs"]), np.float32)
    values[:: len(values) // 2] = log_probs[index]
    return {**example, KEY: values}

  @functools.cached_property
  def _stored(self) -> tuple[np.ndarray, np.ndarray]:
    return read(self.file, self.split, reference=self.reference)

  def signature(self) -> dict[str, Any]:
    """Returns the values on which the meaning of an index depends."""
    return self.pairs.signature()

  def required_vocab_size(self) -> int:
    """Returns the tokenizer's vocabulary size."""
    return self.pairs.required_vocab_size()

  def token_dtypes(self) -> dict[str, np.dtype]:
    """Returns the dtypes of an example's arrays."""
    return {**self.pairs.token_dtypes(), KEY: np.dtype(np.float32)}

  def name(self, index: int) -> str:
    """Returns the name of a pair for messages."""
    return self.pairs.name(index)

  def num_tokens(self, index: int) -> int:
    """Returns the tokens of a pair."""
    return self.pairs.num_tokens(index)


def digest(example: example_source.Example) -> int:
  """Returns the CRC-32 of everything on which log probabilities depend."""
  found = 0
  for name in _DIGESTED:
    found = zlib.crc32(np.ascontiguousarray(example[name]).tobytes(), found)
  return found


def read(
  file: str, split: str, *, reference: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns log probabilities [pairs, 2] and digests [pairs] of a split.

  Raises:
    ValueError: The file has none, or those of another reference.
  """
  try:
    with np.load(file, allow_pickle=False) as found:
      other = str(found[_REFERENCE])
      log_probs, digests = (
        found[f"{split}/{name}"] for name in ("log_probs", "digests")
      )
  except (OSError, ValueError, KeyError, zlib.error) as error:
    raise ValueError(
      f"{file} has no log probabilities of {split} ({error}); compute them with"
      " paxon.tasks.lm.params.reference_log_probs."
    ) from error
  if other != reference:
    raise ValueError(
      f"{file} has log probabilities of the reference {other}, and this one is"
      f" {reference}; compute them again."
    )
  return log_probs, digests


def write(
  file: str,
  splits: Mapping[str, tuple[np.ndarray, np.ndarray]],
  *,
  reference: str,
) -> None:
  """Writes a file, replacing one.

  Args:
    file: Its local path.
    splits: Log probabilities [pairs, 2] and digests [pairs] by split.
    reference: Name of the reference's values.
  """
  arrays: dict[str, Any] = {_REFERENCE: np.asarray(reference)}
  for split, (log_probs, digests) in splits.items():
    arrays[f"{split}/log_probs"] = log_probs.astype(np.float32)
    arrays[f"{split}/digests"] = digests.astype(np.uint32)
  # A run never reads half of a file.
  partial = f"{file}.partial"
  with open(partial, "wb") as opened:
    np.savez(opened, **arrays)
  os.replace(partial, file)
