"""Baselines (xz and trigrams) on the splits of an experiment.

For experiments whose splits are streams of one source of text each; the
quickstart, which reads documents, has its own.
"""

from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxon.inputs import text_baselines


def of_splits(
  splits: Mapping[str, fdl.Config[Any]],
) -> fdl.Config[text_baselines.TextBaselines] | None:
  """Returns baselines on the text of two splits.

  Args:
    splits: `train` and `validation`, each a `PackedInput` with a tokenizer and
      `Examples`; without the latter there is nothing to compare.
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
