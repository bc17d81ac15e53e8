"""Tests for the byte tokenizer."""

import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, tokenizer_protocol

_TOKENIZER = byte_tokenizer.ByteTokenizer()


def test_ids_are_bytes_after_three_special_ids():
  ids = _TOKENIZER.encode("Aé\n")
  assert ids.dtype == np.int32
  # 0x41, then 0xC3 0xA9 (é in UTF-8), then 0x0A.
  assert ids.tolist() == [68, 198, 172, 13]


def test_special_ids_and_sizes():
  assert (_TOKENIZER.pad_id, _TOKENIZER.begin_id, _TOKENIZER.end_id) == (
    0,
    1,
    2,
  )
  assert _TOKENIZER.vocab_size == 259
  assert _TOKENIZER.padded_vocab_size == 264


def test_every_byte_round_trips():
  data = bytes(range(256))
  ids = _TOKENIZER.encode(data)
  assert ids.tolist() == list(range(3, 259))
  assert _TOKENIZER.decode_bytes(ids) == data


def test_text_round_trips_without_special_ids():
  ids = [1, *_TOKENIZER.encode("déf").tolist(), 2, 0, 0, 263]
  assert _TOKENIZER.decode(ids) == "déf"


def test_a_partial_character_decodes_to_a_replacement():
  assert (
    _TOKENIZER.decode(_TOKENIZER.encode("é")[:1]) == "\N{REPLACEMENT CHARACTER}"
  )


def test_empty_text_has_no_ids():
  assert _TOKENIZER.encode("").shape == (0,)
  assert _TOKENIZER.decode([]) == ""
  assert _TOKENIZER.byte_counts([]).shape == (0,)


def test_byte_counts():
  counts = _TOKENIZER.byte_counts([[0, 1, 2], [3, 258, 259]])
  assert counts.dtype == np.int32
  assert counts.tolist() == [[0, 0, 0], [1, 1, 0]]


def test_is_a_tokenizer():
  assert isinstance(_TOKENIZER, tokenizer_protocol.Tokenizer)
  assert not isinstance("text", tokenizer_protocol.Tokenizer)


@pytest.mark.parametrize("wrong", [-1, 264])
def test_rejects_ids_out_of_range(wrong):
  with pytest.raises(ValueError, match=rf"less than 264, got {wrong}"):
    _TOKENIZER.decode([5, wrong, 7])


def test_rejects_ids_that_are_not_integers():
  with pytest.raises(ValueError, match=r"must be integers, got float64"):
    _TOKENIZER.decode([5.0])
