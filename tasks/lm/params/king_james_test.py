"""Tests for the experiment on the King James Bible, with generated verses."""

import fiddle as fdl
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer
from paxon.inputs.sources import token_file_writer
from paxon.tasks.lm.params import king_james


def test_every_fiftieth_verse_is_held_out(tmp_path):
  path = str(tmp_path / "kjv")
  tokenizer = byte_tokenizer.ByteTokenizer()
  verses = [f"Ge1:{i} And it was so." for i in range(1, 151)]
  token_file_writer.write(
    path,
    [np.append(tokenizer.encode(verse), tokenizer.end_id) for verse in verses],
    dtype=np.dtype(np.uint16),
  )
  experiment = king_james.KingJamesLm().replace(tokens=path, length=64)
  splits = {
    name: fdl.build(config) for name, config in experiment.datasets().items()
  }
  (batch,) = splits["validation"]
  texts = tokenizer.decode(batch["targets"][batch["weights"] > 0])
  assert texts == "".join(verses[49::50])
  batch = splits["train"].get_next()
  # Two whole verses of 23 to 25 tokens per sequence of 64.
  assert batch["segment_ids"].max() == 2
  assert (batch["targets"] == tokenizer.end_id).sum() == 16


def test_error_without_data_names_packages():
  train = fdl.build(king_james.KingJamesLm().datasets()["train"])
  with pytest.raises(
    ValueError, match=r"--fdl\.tokens='kjv'. .* apt-get install bible-kjv bib"
  ):
    train.check_readable()
