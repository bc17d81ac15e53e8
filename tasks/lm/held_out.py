"""Data of experiments on numbered examples, of which one in 50 is held out.

Combine with a model family, as the classes of `lm_data`.
"""

from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxon.inputs import packed_input, text_baselines, unset_input
from paxon.inputs import packing as packing_lib
from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream
from paxon.runner import experiment

# One example in this many is held out.
_EVERY = 50


class HeldOut(experiment.Experiment):
  """Examples of one source, split into training and validation.

  Attributes:
    length: Sequence length in tokens.
  """

  length: int

  def splits(
    self,
    source: fdl.Config[Any],
    *,
    tokenizer: fdl.Config[Any],
    packing: packing_lib.Packing,
  ) -> dict[str, fdl.Config]:
    """Returns shuffled training examples and one epoch of held-out ones."""

    def split(is_held_out: bool, batch: int, **order: Any) -> fdl.Config[Any]:
      part = fdl.Config(
        example_source.HeldOut,
        source=source,
        every=_EVERY,
        is_held_out=is_held_out,
      )
      return fdl.Config(
        packed_input.PackedInput,
        examples=fdl.Config(example_stream.Examples, source=part, **order),
        packing=packing,
        tokenizer=tokenizer,
        global_batch_size=batch,
        length=self.length,
      )

    batch = self.global_batch_size
    return {
      "train": split(False, batch, shuffle_seed=self.seed),
      "validation": split(True, 4 * batch, shuffle_seed=None, num_epochs=1),
    }

  def unset(
    self, *, knob: str, example: str, how: str
  ) -> dict[str, fdl.Config]:
    """Returns a placeholder that raises an error when read."""
    unset = fdl.Config(
      unset_input.UnsetInput,
      global_batch_size=self.global_batch_size,
      length=self.length,
      knob=knob,
      example=example,
      how=how,
    )
    return {"train": unset}

  def baselines(self) -> fdl.Config[text_baselines.TextBaselines] | None:
    """Returns xz and a trigram model on the same bytes."""
    return make_baselines(self.datasets())


def make_baselines(
  splits: Mapping[str, fdl.Config[Any]],
) -> fdl.Config[text_baselines.TextBaselines] | None:
  """Returns baselines on the text of two splits; None without `validation`.

  Args:
    splits: `train` and `validation`, each a `PackedInput` with a tokenizer and
      `Examples`.
  """
  if "validation" not in splits:
    return None

  def text(name: str) -> fdl.Config[text_baselines.DecodedDocuments]:
    split = splits[name]
    return fdl.Config(
      text_baselines.DecodedDocuments,
      source=split.examples.source,
      tokenizer=split.tokenizer,
    )

  return fdl.Config(
    text_baselines.TextBaselines,
    train=text("train"),
    held_out=text("validation"),
  )
