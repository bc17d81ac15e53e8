"""What to sample from a model at the end of a run and by `--mode=decode`."""

import dataclasses

from paxon.layers.decoding import samplers


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSettings:
  """Prompts and how they are continued.

  Attributes:
    prompts: Texts to continue; the empty text stands for a new document.
    max_new_tokens: How many tokens are added to each prompt at most.
    sampler: Draws one id a row from logits.
  """

  prompts: tuple[str, ...] = ("",)
  max_new_tokens: int = 256
  sampler: samplers.Sampler = dataclasses.field(default_factory=samplers.Greedy)

  def __post_init__(self) -> None:
    if not self.prompts:
      raise ValueError(
        "GenerationSettings.prompts is empty; give at least one, such as ('',)."
      )
    name = "GenerationSettings.max_new_tokens"
    if self.max_new_tokens <= 0:
      raise ValueError(f"{name} must be positive, got {self.max_new_tokens}.")
    if self.max_new_tokens >= 2**31:  # Positions are int32.
      raise ValueError(
        f"{name} must be less than 2**31, got {self.max_new_tokens}."
      )
