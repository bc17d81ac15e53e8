"""Tests for batches of prompts."""

import numpy as np
import pytest

from paxon.layers.decoding import prompts


def test_pads_on_the_right():
  batch = prompts.pad_right([[5, 6], [7], [8, 9, 10]])
  assert batch.ids.dtype == batch.lengths.dtype == np.int32
  assert batch.ids.tolist() == [[5, 6, 0], [7, 0, 0], [8, 9, 10]]
  assert batch.lengths.tolist() == [2, 1, 3]


def test_pads_to_a_given_length():
  assert prompts.pad_right([[5]], length=3).ids.tolist() == [[5, 0, 0]]


def test_empty_and_too_long_prompts_are_rejected():
  with pytest.raises(ValueError, match="prompts must not be empty"):
    prompts.pad_right([])
  with pytest.raises(ValueError, match=r"Prompt 1 is empty; begin it with"):
    prompts.pad_right([[1], []])
  with pytest.raises(ValueError, match=r"Prompt 0 has 3 ids, more than .*2"):
    prompts.pad_right([[1, 2, 3]], length=2)
