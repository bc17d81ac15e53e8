"""The quickstart's model on the King James Bible, through token files.

The text is Debian's: 31,102 verses, 4.4 MB. To prepare the data and train:

  apt-get install bible-kjv bible-kjv-text &&
  bible -f 'gen1:1-rev22:21' > kjv.txt &&
  tools/tokenize --files=kjv.txt --documents=line --out=kjv &&
  bazel run //runner:main -- --exp=tasks.lm.params.king_james.KingJamesLm
  --fdl.tokens=$PWD/kjv

The same with a byte-level BPE of 4,096 ids, trained on the text, of which a
token has 3.8 bytes on average:

  tools/tokenize train --files=kjv.txt --documents=line --vocab_size=4096
  --out=kjv_bpe &&
  tools/tokenize --files=kjv.txt --documents=line --tokenizer=kjv_bpe
  --out=kjv_bpe/kjv &&
  bazel run //runner:main -- --exp=tasks.lm.params.king_james.KingJamesLm
  --fdl.tokens=$PWD/kjv_bpe/kjv --fdl.tokenizer=$PWD/kjv_bpe
"""

from typing import ClassVar

import fiddle as fdl

from paxon.inputs import packing as packing_lib
from paxon.inputs.sources import token_file
from paxon.tasks.lm import held_out
from paxon.tasks.lm.params import quickstart

_HOW = (
  "Make them: apt-get install bible-kjv bible-kjv-text; bible -f"
  " 'gen1:1-rev22:21' > kjv.txt; tools/tokenize --files=kjv.txt"
  " --documents=line --out=kjv."
)


class KingJamesLm(held_out.HeldOut, quickstart.PythonStdlibLm):
  """0.8 M parameters on the King James Bible, verses packed into sequences.

  Measured 2026-11-23 on one core, in bits per byte on held-out verses: 1.65
  after 1,000 steps of bytes, 1.32 after 710 with the BPE, in 556 s each;
  a byte trigram model reaches 2.52 and `xz -9e` 2.72.

  Attributes:
    tokens: Path of the token files, without extension.
  """

  prompts = ("Ge1:1 In the ", "And ", "Ps23:1 ")

  tokens: str | None = None

  path_knobs = ("tokenizer", "tokens")
  run_requires: ClassVar[tuple[str, ...]] = ("tokens",)

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns shuffled verses and one epoch of held-out ones."""
    if self.tokens is None:
      return self.unset(knob="tokens", example="kjv", how=_HOW)
    tokenizer = self.make_tokenizer()
    verses = fdl.Config(
      token_file.TokenFile,
      path=self.tokens,
      begin_id=fdl.build(tokenizer).begin_id,
      tokenizer=tokenizer,
    )
    return self.splits(
      verses, tokenizer=tokenizer, packing=packing_lib.Packing.BEST_FIT
    )
