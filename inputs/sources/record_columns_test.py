"""Tests for documents and examples of table columns."""

import numpy as np
import pytest

from paxon.inputs.sources import record_columns


def _tokens(row, **given):
  return record_columns.TokenColumn(rows=[row], column="ids", **given)[0]


@pytest.mark.parametrize(
  "value", ["one", b"one", ["one"], np.array([b"one"], object)]
)
def test_text_is_a_string_or_a_list_of_one(value):
  rows = [{"text": value}]
  source = record_columns.TextColumn(rows=rows)
  assert source[0] == b"one"
  assert len(source) == 1


@pytest.mark.parametrize("value", [7, ["a", "b"], None])
def test_rejects_other_types_of_text(value):
  source = record_columns.TextColumn(rows=[{"text": value}])
  with pytest.raises(
    ValueError, match="row 0: the column 'text' must be a str"
  ):
    _ = source[0]


def test_tokens_have_begin_and_end_ids():
  assert _tokens({"ids": [5, 6]})["targets"].tolist() == [6]
  example = _tokens({"ids": [5, 6]}, begin_id=0, end_id=1)
  assert example["inputs"].tolist() == [0, 5, 6]
  assert example["targets"].tolist() == [5, 6, 1]
  again = _tokens({"ids": [5, 1]}, begin_id=0, end_id=1)
  assert again["targets"].tolist() == [5, 1]


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({"other": []}, r"row 0 has no column 'ids'; it has \['other'\]"),
    ({"ids": [0.5]}, "must be a list of integers"),
    ({"ids": [[1]]}, "must be a list of integers"),
    ({"ids": [1, 9]}, "ids from 1 to 9, and they must be .* less than 9"),
    ({"ids": [-1, 8]}, "ids from -1 to 8"),
  ],
)
def test_rejects_tokens_of_another_type_or_vocabulary(row, message):
  with pytest.raises(ValueError, match=message):
    _tokens(row, vocab_size=9)


@pytest.mark.parametrize("name", ["begin_id", "end_id"])
def test_rejects_added_ids_outside_the_vocabulary(name):
  assert _tokens({"ids": [5]}, vocab_size=9, **{name: 8})["inputs"].size == 1
  for wrong, size in ((9, 9), (-1, None)):
    with pytest.raises(ValueError, match=rf"{name} must be an id .* got"):
      _tokens({"ids": [5]}, vocab_size=size, **{name: wrong})


def test_reports_the_vocabulary_size():
  with pytest.raises(ValueError, match=r"vocab_size must be positive, got 0"):
    record_columns.TokenColumn(rows=[], vocab_size=0)
  column = record_columns.TokenColumn(rows=[], vocab_size=9)
  assert column.required_vocab_size() == 9
  assert len(column) == 0
