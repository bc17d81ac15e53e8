"""What a model sees of a task's features: SeqIO's four forms.

A converter turns the features of one example of a task into the arrays that
are packed. For `inputs` = a b and `targets` = c d 1, with 0 to begin:

    LanguageModel     inputs 0 c d        targets c d 1
    PrefixLm          inputs 0 a b c d    targets a b c d 1
                      weights 0 0 1 1 1   prefix 1 1 1 0 0
    EncoderDecoder    encoder_inputs a b  inputs 0 c d    targets c d 1
    Encoder           inputs a m          targets a b     weights 0 1

Segments and positions come with packing; lengths, shuffling and hosts are no
concern of a converter.
"""

from collections.abc import Mapping
import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from paxon.inputs import example_source, tokenizer_protocol

Features = Mapping[str, np.ndarray]


@runtime_checkable
class FeatureConverter(Protocol):
  """Makes an example of a task's features."""

  @property
  def keys(self) -> tuple[str, ...]:
    """The features that it needs."""
    ...

  def __call__(self, features: Features, /) -> example_source.Example:
    """Returns the arrays to pack.

    Raises:
      ValueError: A feature does not have the form that is needed.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
  """A text that is learnt token by token.

  Attributes:
    begin_id: The input before the first target. SeqIO has 0.
    end_id: Put after a text that does not end with it; None adds nothing.
    feature: Where the ids are.
    tokenizer: Counts the bytes of each target, for bits per byte; None counts
      nothing.
  """

  begin_id: int = 0
  end_id: int | None = None
  feature: str = "targets"
  tokenizer: tokenizer_protocol.Tokenizer | None = None

  @property
  def keys(self) -> tuple[str, ...]:
    """The one feature."""
    return (self.feature,)

  def __call__(self, features: Features, /) -> example_source.Example:
    """Returns `inputs`, `targets` and maybe `target_bytes`, int32 [n]."""
    ids = _ended(_ids(features, self.feature), self.end_id)
    example = {"inputs": _shifted(ids, self.begin_id), "targets": ids}
    if self.tokenizer is not None:
      counts = self.tokenizer.byte_counts(ids)
      example["target_bytes"] = np.asarray(counts, np.int32)
    return example


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixLm:
  """A text of which the first part is given.

  Attributes:
    begin_id: The input before the first token.
    end_id: Put after targets that do not end with it; None adds nothing.
    loss_on_inputs: Whether the given part is learnt too.
  """

  begin_id: int = 0
  end_id: int | None = None
  loss_on_inputs: bool = False

  @property
  def keys(self) -> tuple[str, ...]:
    """`inputs`, what is given, and `targets`."""
    return ("inputs", "targets")

  def __call__(self, features: Features, /) -> example_source.Example:
    """Returns `inputs`, `targets`, `weights` and `prefix` (bool), all [n].

    A place is in the prefix if its input is known beforehand: all that are
    given, and the beginning.
    """
    given = _ids(features, "inputs")
    targets = _ended(_ids(features, "targets"), self.end_id)
    ids = np.concatenate([given, targets])
    place = np.arange(len(ids))
    learnt = (place >= len(given)) | self.loss_on_inputs
    return {
      "inputs": _shifted(ids, self.begin_id),
      "targets": ids,
      "weights": learnt.astype(np.float32),
      "prefix": place <= len(given),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
  """One text that is read, and another that is written.

  Attributes:
    begin_id: The decoder's input before the first target.
    end_id: Put after targets that do not end with it; None adds nothing.
  """

  begin_id: int = 0
  end_id: int | None = None

  @property
  def keys(self) -> tuple[str, ...]:
    """`inputs`, what is read, and `targets`."""
    return ("inputs", "targets")

  def __call__(self, features: Features, /) -> example_source.Example:
    """Returns `encoder_inputs` [m], `inputs` and `targets` [n], int32."""
    ids = _ended(_ids(features, "targets"), self.end_id)
    return {
      "encoder_inputs": _ids(features, "inputs"),
      "inputs": _shifted(ids, self.begin_id),
      "targets": ids,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
  """A text with hidden places, to be found out from those around them.

  Attributes:
    mask_id: The input of a hidden place; the others are not learnt.
  """

  mask_id: int

  @property
  def keys(self) -> tuple[str, ...]:
    """`inputs`, with hidden places, and `targets`, the whole text."""
    return ("inputs", "targets")

  def __call__(self, features: Features, /) -> example_source.Example:
    """Returns `inputs`, `targets` and `weights`, all [n]."""
    inputs, targets = _ids(features, "inputs"), _ids(features, "targets")
    if len(inputs) != len(targets):
      raise ValueError(
        f"Encoder needs as many inputs as targets, got {len(inputs)} and"
        f" {len(targets)}."
      )
    hidden = inputs == self.mask_id
    return {
      "inputs": inputs,
      "targets": targets,
      "weights": hidden.astype(np.float32),
    }


def _ids(features: Features, name: str) -> np.ndarray:
  """Returns a feature as int32 [n]."""
  ids = features[name]
  if ids.ndim != 1 or ids.dtype.kind not in "iu":
    raise ValueError(
      f"The feature {name!r} must be integers [n], got {ids.dtype}"
      f" {list(ids.shape)}."
    )
  return ids.astype(np.int32)


def _ended(ids: np.ndarray, end_id: int | None) -> np.ndarray:
  # Nothing at all is an example that was filtered out.
  if end_id is None or not len(ids) or ids[-1] == end_id:
    return ids
  return np.append(ids, np.int32(end_id))


def _shifted(ids: np.ndarray, begin_id: int) -> np.ndarray:
  """Returns the input at each target: the one before it."""
  if not len(ids):
    return ids
  return np.concatenate([np.array([begin_id], np.int32), ids[:-1]])
