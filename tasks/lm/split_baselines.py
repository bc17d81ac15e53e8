"""Baselines (xz and trigrams) on the splits of an experiment.

Each split must read one source of text through `Examples`.
"""

from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxon.inputs import text_baselines


def of_splits(
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
