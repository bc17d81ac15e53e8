"""Prompts with room for the answers that a model in training will sample."""

import dataclasses
from typing import Any

import numpy as np

from paxon.inputs import checks
from paxon.inputs.sources import example_source


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptGroups(example_source.Tokenized):
  """Prompts as examples of G parts of T tokens, of which the first begins.

  The arrays are those of `layers.models.policy_lm`: `inputs` has the prompt
  after BEGIN, `is_token` 1 for its ids, `weights` 1 for an answer, and
  all else is 0 or padding. `runner.training.rollouts` fills in the answers and
  their rewards.

  Attributes:
    source: The texts of the prompts; with a template chats, such as
      `inputs.tokenizers.chats.PromptLines`.
    tokenizer: The tokenizer.
    group_size: G, the number of answers of a prompt.
    length: T, the tokens of a prompt and an answer.
    answer_length: The tokens that are free for an answer.
    template: A `ChatTemplate`; None for texts.
  """

  source: example_source.DocumentSource
  tokenizer: Any
  group_size: int
  length: int
  answer_length: int
  template: Any = None

  def __post_init__(self) -> None:
    checks.check_positive(self, "group_size", "length", "answer_length")

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns the arrays of a group.

    Raises:
      ValueError: The prompt leaves too little room for an answer, or the
        template rejects it.
    """
    prompt = self.source[index]
    if self.template is None:
      ids = [self.tokenizer.begin_id, *self.tokenizer.encode(prompt)]
    else:
      try:
        ids = self.template.encode_prompt(prompt, self.tokenizer).tolist()
      except ValueError as error:
        name = example_source.call_optional(self.source, "name", index)
        raise ValueError(f"{name or f'Prompt {index}'}: {error}") from error
    if len(ids) > self.length - self.answer_length:
      raise ValueError(
        f"Prompt {index} has {len(ids)} tokens, and length ({self.length}) has"
        f" room for {self.length - self.answer_length} next to an answer of"
        f" {self.answer_length}."
      )
    size = self.group_size * self.length
    inputs = np.full(size, self.tokenizer.pad_id, np.int32)
    inputs[: len(ids)] = ids
    is_answer = np.zeros(self.length, np.float32)
    is_answer[self.length - self.answer_length :] = 1
    is_token = (np.arange(size) < len(ids)).astype(np.int32)
    return {
      "inputs": inputs,
      "targets": np.full(size, self.tokenizer.pad_id, np.int32),
      "is_token": is_token,
      "weights": np.tile(is_answer, self.group_size),
      "rewards": np.zeros(size, np.float32),
    }

  def signature(self) -> dict[str, Any]:
    """Returns the values on which the meaning of an index depends."""
    return {"num_prompts": len(self)}

  def token_dtypes(self) -> dict[str, np.dtype]:
    """Returns the dtypes of an example's arrays."""
    integers = dict.fromkeys(
      ("inputs", "targets", "is_token"), np.dtype(np.int32)
    )
    floats = dict.fromkeys(("weights", "rewards"), np.dtype(np.float32))
    return {**integers, **floats}

  def num_tokens(self, index: int) -> int:
    """Returns G T, for any example."""
    del index
    return self.group_size * self.length
