"""Converters from task features to model inputs, as SeqIO's four.

A converter turns the features of one example into the arrays to pack. For
`inputs` = a b, `targets` = c d 1, begin id 0 and mask id m:

    LanguageModel     inputs 0 c d        targets c d 1
    PrefixLm          inputs 0 a b c d    targets a b c d 1
                      weights 0 0 1 1 1   prefix 1 1 1 0 0
    EncoderDecoder    encoder_inputs a b  inputs 0 c d    targets c d 1
    Encoder           inputs a m          targets a b     weights 0 1

Packing adds segments and positions.
"""

from collections.abc import Mapping
import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from paxon.inputs import tokenizer_protocol
from paxon.inputs.sources import example_source

Features = Mapping[str, np.ndarray]


@runtime_checkable
class FeatureConverter(Protocol):
  """Converts the features of an example."""

  @property
  def keys(self) -> tuple[str, ...]:
    """The features to read."""
    ...

  def __call__(self, features: Features, /) -> example_source.Example:
    """Returns the arrays to pack.

    Raises:
      ValueError: A feature has a wrong shape or dtype.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
  """Autoregressive language modeling of one feature.

  Attributes:
    begin_id: The input before the first target. SeqIO's is 0.
    end_id: Appended to texts that do not end with it. None appends nothing.
    feature: The feature of token ids.
    tokenizer: Adds `target_bytes`, for bits per byte. None does not.
  """

  begin_id: int = 0
  end_id: int | None = None
  feature: str = "targets"
  tokenizer: tokenizer_protocol.Tokenizer | None = None

  @property
  def keys(self) -> tuple[str, ...]:
    """`feature`."""
    return (self.feature,)

  def __call__(self, features: Features, /) -> example_source.Example:
    """Returns `inputs`, `targets`, and `target_bytes` if set, int32 [n]."""
    ids = _append_end(_ids(features, self.feature), self.end_id)
    begin = np.array([self.begin_id], np.int32)
    tokens = np.concatenate([begin, ids])
    return example_source.lm_features(tokens, self.tokenizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixLm:
  """Language modeling of targets after a bidirectional prefix.

  Attributes:
    begin_id: The input before the first token.
    end_id: Appended to targets that do not end with it. None appends nothing.
    loss_on_inputs: Whether the loss includes the prefix.
  """

  begin_id: int = 0
  end_id: int | None = None
  loss_on_inputs: bool = False

  @property
  def keys(self) -> tuple[str, ...]:
    """`inputs`, the prefix, and `targets`."""
    return ("inputs", "targets")

  def __call__(self, features: Features, /) -> example_source.Example:
    """Returns `inputs`, `targets`, `weights` and `prefix` (bool), all [n].

    `prefix` is true where the input is `begin_id` or a token of the prefix.
    """
    given = _ids(features, "inputs")
    targets = _append_end(_ids(features, "targets"), self.end_id)
    ids = np.concatenate([given, targets])
    place = np.arange(len(ids))
    learnt = (place >= len(given)) | self.loss_on_inputs
    return {
      "inputs": _shift(ids, self.begin_id),
      "targets": ids,
      "weights": learnt.astype(np.float32),
      "prefix": place <= len(given),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
  """Encoder inputs with decoder targets.

  Attributes:
    begin_id: The decoder's input before the first target.
    end_id: Appended to targets that do not end with it. None appends nothing.
  """

  begin_id: int = 0
  end_id: int | None = None

  @property
  def keys(self) -> tuple[str, ...]:
    """`inputs`, of the encoder, and `targets`."""
    return ("inputs", "targets")

  def __call__(self, features: Features, /) -> example_source.Example:
    """Returns `encoder_inputs` [m], `inputs` and `targets` [n], int32."""
    ids = _append_end(_ids(features, "targets"), self.end_id)
    return {
      "encoder_inputs": _ids(features, "inputs"),
      "inputs": _shift(ids, self.begin_id),
      "targets": ids,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
  """Masked language modeling.

  Attributes:
    mask_id: The id of masked tokens; the loss includes only these.
  """

  mask_id: int

  @property
  def keys(self) -> tuple[str, ...]:
    """`inputs`, with masked tokens, and `targets`, the original text."""
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


def _append_end(ids: np.ndarray, end_id: int | None) -> np.ndarray:
  # An empty text marks an example that was filtered out.
  if end_id is None or not len(ids) or ids[-1] == end_id:
    return ids
  return np.append(ids, np.int32(end_id))


def _shift(ids: np.ndarray, begin_id: int) -> np.ndarray:
  """Returns the ids shifted right by one, with `begin_id` first."""
  if not len(ids):
    return ids
  return np.concatenate([np.array([begin_id], np.int32), ids[:-1]])
