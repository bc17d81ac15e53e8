"""Contracts: protocols of modules that other modules, tools and programs call.

A linen module keeps a contract by its methods and fields, without inheritance.
Callers annotate what they call with a protocol, and test for an optional
feature by `isinstance`; a declared name that does not exist is then an error of
the type checker, not a feature that is silently off.

  TokenMixer       called by blocks: attention, recurrent layers
  Rotary           called by attention layers
  HasDropout, TakesSegments, HasRandomStreams       optional features of layers
  TrainedModel     called by training and evaluation
  LanguageModel    also called by generation, serving and decoding
  EncoderDecoder   a language model whose encoder reads the prompt

Letters: B batch, T length, D embed, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn
import jax

from paxon.layers import token_context

Batch = Mapping[str, jax.Array]
Weighted = tuple[jax.Array, jax.Array]


@runtime_checkable
class TokenMixer(Protocol):
  """A layer that mixes tokens: attention or a recurrent layer.

  It has neither norm, residual nor dropout of the output, which belong to the
  block. Tokens of different segments do not influence each other, and padding
  has no influence.
  """

  def __call__(
    self, x: jax.Array, context: token_context.TokenContext, /
  ) -> jax.Array:
    """Returns the mixed tokens [B,T,D] of `x` [B,T,D].

    Raises:
      TypeError: Positions or segments are not integers.
      ValueError: Shapes do not fit, or the layer does not support the context,
        such as a prefix while decoding.
    """
    ...


@runtime_checkable
class Rotary(Protocol):
  """A rotation of queries and keys that knows which heads it can rotate.

  Attention layers accept any function of the same arguments.
  """

  @property
  def depends_on_length(self) -> bool:
    """Whether frequencies depend on the length of a document."""
    ...

  def check_width(self, width: int, field: str) -> None:
    """Raises ValueError if heads of the width in `field` cannot be rotated."""
    ...

  def __call__(self, x: jax.Array, positions: jax.Array, /) -> jax.Array:
    """Returns `x` [B,T,N,H] rotated by the positions [B,T], in its dtype."""
    ...


@runtime_checkable
class HasDropout(Protocol):
  """A layer whose call takes `deterministic` if `dropout` is set."""

  dropout: nn.Module | None


@runtime_checkable
class TakesSegments(Protocol):
  """A feed-forward layer whose call takes `segment_ids` and `deterministic`."""

  takes_segment_ids: bool


@runtime_checkable
class HasRandomStreams(Protocol):
  """A module that draws from further random streams in training."""

  @property
  def random_streams(self) -> Sequence[str]:
    """Names of the streams."""
    ...


@runtime_checkable
class TrainedModel(Protocol):
  """A model that training and evaluation call."""

  def loss(self, batch: Batch, /, *, deterministic: bool) -> Any:
    """Returns the loss, metrics and outputs of a batch.

    The loss and each metric are pairs `(sum, weight)`; outputs are arrays
    [B,...] by name. `deterministic` disables dropout.
    """
    ...


@runtime_checkable
class CountsTargets(Protocol):
  """A model that may declare that it weighs each target of a batch.

  The weight of its loss is then the sum of the batch's `weights`.
  """

  counts_each_target: bool


@runtime_checkable
class HasStack(Protocol):
  """A model with one stack of layers."""

  stack: nn.Module


@runtime_checkable
class HasEmbedding(Protocol):
  """A model that embeds ids."""

  embedding: nn.Module


@runtime_checkable
class HasVocabSize(Protocol):
  """An embedding with a fixed number of ids."""

  @property
  def vocab_size(self) -> int:
    """Number of ids."""
    ...


@runtime_checkable
class Generator(Protocol):
  """A model that continues token sequences."""

  def prefill(self, *args: Any, **kwargs: Any) -> jax.Array:
    """Reads prompts into a new cache; returns logits [B,T,V] or [B,1,V].

    The arguments are `inputs`, `positions`, `segment_ids`, all [B,T], and the
    keywords `cache_length` and `at`, the index [B] of the token whose logits
    are returned; for encoder-decoder models also those of the encoder.
    """
    ...

  def decode_step(self, *args: Any, **kwargs: Any) -> jax.Array:
    """Appends tokens to the cache; returns their logits [B,T,V].

    The arguments are `inputs`, `positions` and `segment_ids`, all [B,T].
    """
    ...


@runtime_checkable
class LanguageModel(TrainedModel, Generator, Protocol):
  """A model that is trained and generates, such as `models.DecoderLm`."""


@runtime_checkable
class EncoderDecoder(Protocol):
  """A model whose encoder reads the prompt."""

  def encode(self, *args: Any, **kwargs: Any) -> Any:
    """Returns the output of the encoder."""
    ...


@runtime_checkable
class Predictor(Protocol):
  """A model with predictions that can be shown beside examples."""

  def predict(self, batch: Batch, /) -> dict[str, jax.Array]:
    """Returns predictions [B,...] by name."""
    ...
