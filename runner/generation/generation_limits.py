"""Limits of generation: positions, ids and finite log probabilities.

A model with a table of learned positions has no more of them than the table. A
sequence of P tokens that is continued by N takes P + N - 1, because the last
token is not read.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from paxon.inputs import tokenizer_protocol
from paxon.layers import contracts
from paxon.layers.models import language_model
from paxon.layers.positions import position_embedding, rotary_scaling
from paxon.layers.stacks import shared
from paxon.runner import exit_status, user_error
from paxon.runner import job as job_lib

# End of the names of fields with a table of positions.
_TABLES = "position_embedding"
# Characters of a text in an error.
_EXCERPT = 60


class NonFiniteError(user_error.UserError):
  """A model gives log probabilities that are not numbers."""

  status = exit_status.ExitStatus.NUMERICS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
  """Number of tokens that a model can hold; None for any number.

  Attributes:
    tokens: Tokens of a sequence that it continues.
    source: Source of an encoder's sequence.
  """

  tokens: int | None = None
  source: int | None = None


def find_trained(model: Any) -> Any:
  """Returns the language model in a model that trains it."""
  while isinstance(model, language_model.OtherLoss):
    model = model.trained_model
  return model


def find_vocab_size(model: Any) -> int | None:
  """Returns the number of ids that a model embeds; None if unknown."""
  trained = find_trained(model)
  if not isinstance(trained, contracts.HasEmbedding):
    return None
  table = trained.embedding
  if isinstance(table, shared.Shared):
    table = table.part
  return table.vocab_size if isinstance(table, contracts.HasVocabSize) else None


def has_encoder(model: Any) -> bool:
  """Whether a model is an encoder-decoder, whose encoder reads the prompt."""
  return isinstance(find_trained(model), contracts.EncoderDecoder)


def find_capacity(model: Any, *, draft: Any = None) -> Capacity:
  """Returns the number of tokens that a model has positions for.

  Args:
    model: The model.
    draft: The model that drafts for it, whose sequences are the same.
  """
  nodes = [*_walk(find_trained(model))]
  source = [size for size, is_source in _find_tables(nodes) if is_source]
  tokens = [size for size, is_source in _find_tables(nodes) if not is_source]
  drafted = None if draft is None else find_capacity(draft).tokens
  return Capacity(
    tokens=min([*tokens, *filter(None, [drafted])], default=None),
    source=min(source, default=None) if has_encoder(model) else None,
  )


def check_ids(
  job: job_lib.Job, ids: Sequence[int] | np.ndarray, *, text: str | None = None
) -> None:
  """Raises UserError if an id is not in the model's embedding.

  It would be embedded as NaN. `text` is that of the ids, for the message.
  """
  size, array = find_vocab_size(job.task.model), np.asarray(ids)
  if size is None or not array.size or array.max() < size:
    return
  number = int(array[array >= size][0])
  where = "" if text is None else f" of {text[:_EXCERPT]!r}"
  raise user_error.UserError(
    f"The id {number}{name_token(job.task.tokenizer, number)}{where} is not in"
    f" the model's embedding, which has {size} ids; leave that token out, or"
    " use the tokenizer that the model was trained with."
  )


def name_token(tokenizer: object, number: int) -> str:
  """Returns the name of a token in parentheses; empty if it is not known."""
  name = None
  if isinstance(tokenizer, tokenizer_protocol.NamesTokens):
    name = tokenizer.find_token(number)
  return "" if name is None else f" ({name!r})"


def check_lengths(
  model: Any, size: int, count: int, *, draft: Any = None, suffix: int = 0
) -> None:
  """Checks that a model can continue a prompt.

  Args:
    model: The model.
    size: Number of tokens of the prompt.
    count: Number of new tokens.
    draft: The model that drafts for it.
    suffix: Number of tokens that are scored after the new ones.

  Raises:
    UserError: It has too few positions, or generation crosses a length of
      LongRoPE.
  """
  capacity, what = find_capacity(model, draft=draft), "prompt"
  if capacity.source is not None and size > capacity.source:
    raise user_error.UserError(
      f"A prompt of {size} tokens is too long: the encoder has positions for"
      f" {capacity.source}; shorten the prompt."
    )
  if has_encoder(model):
    # The decoder begins with one token.
    size, what = 1, "begin token"
  most = capacity.tokens
  # A suffix is scored with the last token.
  scored = suffix and suffix + 1
  needed = size + count - 1 + scored
  if most is not None and needed > most:
    advice, new = "shorten the prompt", f"{count} new ones"
    if size + scored <= most:
      advice = f"set max_new_tokens to at most {most - size - scored + 1}"
      advice += "" if has_encoder(model) else ", or shorten the prompt"
    note = " (the last token needs none)"
    if suffix:
      new, note = f"{new} with a suffix of {suffix}", ""
    raise user_error.UserError(
      f"A {what} of {size} tokens and {new} need {needed} positions{note}, and"
      f" the model has {most}; {advice}."
    )
  if draft is not None:
    _check_draft(find_trained(model), size + count - 1)
  for switch in _find_switches(find_trained(model)):
    if size <= switch <= size + count - 2:
      raise user_error.UserError(
        f"A prompt of {size} tokens and {count} new ones cross position"
        f" {switch}, where the model changes to the frequencies of long"
        " documents (LongRoPE); make max_new_tokens smaller, or the prompt"
        f" longer than {switch} tokens."
      )


def _check_draft(model: Any, count: int) -> None:
  """Raises UserError if drafts of a sequence cannot be verified together."""
  for _, value, _ in _walk(model):
    is_dynamic = isinstance(value, rotary_scaling.DynamicScaling)
    if is_dynamic and count > value.original_length:
      raise user_error.UserError(
        f"{count} tokens are more than {value.original_length}, after which the"
        " angles of each token depend on the length (dynamic RoPE), so drafts"
        " cannot be verified together; generate without a draft model."
      )


def reads_whole_prompts(model: Any) -> bool:
  """Whether a prompt must be read in one step.

  So it is if the angles of its keys depend on its length.
  """
  return any(
    isinstance(value, rotary_scaling.LengthScaling)
    for _, value, _ in _walk(model)
  )


def check_splits(job: job_lib.Job) -> None:
  """Raises UserError if the model has too few positions for a split.

  Models that train another one arrange sequences themselves.
  """
  model = job.task.model
  if find_trained(model) is not model:
    return
  capacity = find_capacity(model)
  most = {"length": capacity.tokens, "encoder_length": capacity.source}
  for split, source in job.eval_inputs.items():
    for name, size in most.items():
      length = getattr(source, name, None)
      if size and length and source.unit == "tokens" and length > size:
        raise user_error.UserError(
          f"The split {split!r} has sequences of {length} tokens ({name}), and"
          f" the model has {size} positions; set {name} to at most {size}."
        )


def check_finite(log_probs: npt.ArrayLike | float, *, prompt: str = "") -> None:
  """Raises NonFiniteError if a log probability, or one of [N], is NaN.

  `prompt` is the text that was continued, for the message.
  """
  bad = np.flatnonzero(np.isnan(log_probs))
  if bad.size:
    where = f" of new token {bad[0] + 1} after {prompt[-_EXCERPT:]!r}"
    raise NonFiniteError(
      f"The log probability{where if prompt else ''} is NaN; the model's"
      " weights or activations are not finite."
    )


def _walk(
  value: Any, name: str = "", *, in_encoder: bool = False
) -> Iterator[tuple[str, Any, bool]]:
  """Yields the fields of a model: name, value, whether in its encoder."""
  yield name, value, in_encoder
  if isinstance(value, list | tuple):
    for each in value:
      yield from _walk(each, name, in_encoder=in_encoder)
  # A class, such as that of a block, has no values.
  elif dataclasses.is_dataclass(value) and not isinstance(value, type):
    for field in dataclasses.fields(value):
      if field.name != "parent":
        yield from _walk(
          getattr(value, field.name),
          field.name,
          in_encoder=in_encoder or "encoder" in field.name,
        )


def _find_tables(
  nodes: Sequence[tuple[str, Any, bool]],
) -> Iterator[tuple[int, bool]]:
  """Yields the size of each table of positions, and whether of an encoder."""
  for name, value, in_encoder in nodes:
    is_known = isinstance(value, position_embedding.LearnedPositions)
    if isinstance(value, position_embedding.GridPositions):
      yield value.length, in_encoder
    elif is_known or name.endswith(_TABLES):
      # A user's class may have such a field.
      size = getattr(value, "max_length", None)
      if isinstance(size, int):
        yield size, in_encoder


def _find_switches(model: Any) -> set[int]:
  """Returns the original lengths of LongRoPE in a model."""
  return {
    value.original_length
    for _, value, _ in _walk(model)
    if isinstance(value, rotary_scaling.LongScaling)
  }
