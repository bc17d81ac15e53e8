"""Settings of text generation, at the end of a run and in `--mode=decode`."""

from collections.abc import Callable
import dataclasses
from typing import Any

import fiddle as fdl

from paxon.layers.decoding import samplers
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSettings:
  """Prompts and how they are continued.

  Attributes:
    prompts: Texts to continue; an empty string starts a new document.
    max_new_tokens: Maximum number of tokens generated for each prompt.
    sampler: Draws a token from the logits of each sequence.
    num_samples: Number of continuations of each prompt; more than one requires
      another sampler than `Greedy`.
    end_ids: Ids that end a sequence; None for the tokenizer's `end_id`.
    chat_template: Returns the prompt for the assistant's next turn in a list of
      messages; None without chats.
  """

  prompts: tuple[str, ...] = ("",)
  max_new_tokens: int = 256
  sampler: samplers.Sampler = dataclasses.field(default_factory=samplers.Greedy)
  num_samples: int = 1
  end_ids: tuple[int, ...] | None = None
  chat_template: Callable[[Any], str] | None = None

  def __post_init__(self) -> None:
    if not self.prompts:
      raise ValueError(
        "GenerationSettings.prompts is empty; set at least one, such as ('',)."
      )
    checks.check_positive(self, "max_new_tokens", "num_samples")
    checks.check_size(self, "max_new_tokens")  # Positions are int32.
    if self.num_samples > 1 and isinstance(self.sampler, samplers.Greedy):
      raise ValueError(
        f"GenerationSettings.num_samples is {self.num_samples}, but greedy"
        " samples of a prompt are all equal; set a temperature."
      )
    if self.end_ids is not None and not self.end_ids:
      raise ValueError(
        "GenerationSettings.end_ids is empty; use None for the tokenizer's"
        " end_id."
      )


def make_sampler(
  temperature: float | None, top_k: int | None, top_p: float | None
) -> fdl.Config[samplers.Sampler]:
  """Returns a sampler; a temperature of 0 or None selects the most likely id.

  Raises:
    ValueError: `top_k` or `top_p` is set without a temperature.
  """
  truncation = {"top_k": top_k, "top_p": top_p}
  given = {k: v for k, v in truncation.items() if v is not None}
  if temperature:
    return fdl.Config(samplers.Temperature, temperature=temperature, **given)
  if given and temperature is None:
    raise ValueError(f"{' and '.join(given)}: set temperature, too.")
  return fdl.Config(samplers.Greedy)
