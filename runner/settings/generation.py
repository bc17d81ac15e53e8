"""Settings of text generation, at the end of a run and in `--mode=decode`."""

import dataclasses

from paxon.layers.decoding import samplers
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSettings:
  """Prompts and how they are continued.

  Attributes:
    prompts: Texts to continue; an empty string starts a new document.
    max_new_tokens: Maximum number of tokens generated for each prompt.
    sampler: Draws a token from the logits of each sequence.
  """

  prompts: tuple[str, ...] = ("",)
  max_new_tokens: int = 256
  sampler: samplers.Sampler = dataclasses.field(default_factory=samplers.Greedy)

  def __post_init__(self) -> None:
    if not self.prompts:
      raise ValueError(
        "GenerationSettings.prompts is empty; set at least one, such as ('',)."
      )
    checks.check_positive(self, "max_new_tokens")
    checks.check_size(self, "max_new_tokens")  # Positions are int32.
