"""The quickstart's model on the King James Bible, through token files.

The text is Debian's: 31,102 verses, 4.4 MB. To prepare the data and train:

  apt-get install bible-kjv bible-kjv-text &&
  bible -f 'gen1:1-rev22:21' > kjv.txt &&
  tools/tokenize --files=kjv.txt --documents=line --out=kjv &&
  bazel run //runner:main -- --exp=tasks.lm.params.king_james.KingJamesLm
  --fdl.tokens=$PWD/kjv
"""

from typing import Any

import fiddle as fdl

from paxon.inputs import (
  byte_tokenizer,
  example_source,
  example_stream,
  packed_input,
  text_baselines,
  token_file,
  unset_input,
)
from paxon.inputs import packing as packing_lib
from paxon.runner.settings import generation as generation_lib
from paxon.tasks.lm import split_baselines
from paxon.tasks.lm.params import quickstart

# One verse in this many is held out.
_EVERY = 50
_HOW = (
  "Make them: apt-get install bible-kjv bible-kjv-text; bible -f"
  " 'gen1:1-rev22:21' > kjv.txt; tools/tokenize --files=kjv.txt"
  " --documents=line --out=kjv."
)


class KingJamesLm(quickstart.PythonStdlibLm):
  """0.8 M parameters on the King James Bible, verses packed into sequences.

  Measured 2026-11-21 on a CPU after 1,000 steps: 1.65 bits per byte on held-out
  verses; a byte trigram model reaches 2.52 and `xz -9e` 2.72.

  Attributes:
    tokens: Path of the token files, without extension.
  """

  tokens: str | None = None

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns shuffled verses and one epoch of held-out ones."""
    if self.tokens is None:
      unset = fdl.Config(
        unset_input.UnsetInput,
        global_batch_size=self.global_batch_size,
        length=self.length,
        knob="tokens",
        example="kjv",
        how=_HOW,
      )
      return {"train": unset}
    return {
      "train": self._input(
        is_held_out=False,
        shuffle_seed=self.seed,
        global_batch_size=self.global_batch_size,
      ),
      "validation": self._input(
        is_held_out=True,
        shuffle_seed=None,
        num_epochs=1,
        global_batch_size=4 * self.global_batch_size,
      ),
    }

  def generation(self) -> fdl.Config[generation_lib.GenerationSettings]:
    """Returns settings of the samples at the end of training."""
    settings = super().generation()
    settings.prompts = ("Ge1:1 In the ", "And ", "Ps23:1 ")
    return settings

  def baselines(self) -> fdl.Config[text_baselines.TextBaselines] | None:
    """Returns xz and a trigram model on the same bytes."""
    return split_baselines.of_splits(self.datasets())

  def _input(
    self, *, is_held_out: bool, global_batch_size: int, **order: Any
  ) -> fdl.Config[packed_input.PackedInput]:
    tokenizer = byte_tokenizer.ByteTokenizer()
    verses = fdl.Config(
      token_file.TokenFile,
      path=self.tokens,
      begin_id=tokenizer.begin_id,
      tokenizer=fdl.Config(byte_tokenizer.ByteTokenizer),
    )
    source = fdl.Config(
      example_source.HeldOut,
      source=verses,
      every=_EVERY,
      is_held_out=is_held_out,
    )
    return fdl.Config(
      packed_input.PackedInput,
      examples=fdl.Config(example_stream.Examples, source=source, **order),
      packing=packing_lib.Packing.BEST_FIT,
      tokenizer=fdl.Config(byte_tokenizer.ByteTokenizer),
      global_batch_size=global_batch_size,
      length=self.length,
    )
