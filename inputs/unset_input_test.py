"""Tests for the placeholder input."""

import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, packed_input, unset_input
from paxon.inputs.sources import example_source


def _unset():
  return unset_input.UnsetInput(
    global_batch_size=4, length=8, knob="train_files", example="a/*.json"
  )


def test_has_the_shapes_of_packed_sequences():
  packed = packed_input.pack_documents(
    source=example_source.InMemoryDocuments(["text"]),
    tokenizer=byte_tokenizer.ByteTokenizer(),
    shuffle_seed=None,
    global_batch_size=4,
    length=8,
  )
  source = _unset()
  for each in (packed, source):
    each.set_infeed_hosts(infeed_host_index=1, num_infeed_hosts=2)
  shapes = source.batch_shapes()
  assert shapes == packed.batch_shapes()
  assert shapes["inputs"] == ((2, 8), np.dtype(np.int32))


def test_has_one_position():
  source = _unset()
  source.set_state(source.get_state())
  source.reset()
  assert source.get_state() == {}
  assert source.is_endless


@pytest.mark.parametrize(
  "read",
  [
    lambda source: source.get_next(),
    lambda source: source.check_readable(),
    lambda source: source.set_state({"epoch": 0}),
  ],
)
def test_the_error_names_the_field(read):
  message = r"train_files is not set\. .*--fdl\.train_files='a/\*\.json'"
  with pytest.raises(ValueError, match=message):
    read(_unset())


def test_the_error_includes_how():
  source = unset_input.UnsetInput(
    global_batch_size=4, length=8, knob="tokens", example="x", how="Buy them."
  )
  with pytest.raises(ValueError, match=r"--fdl.tokens='x'. Buy them.$"):
    source.check_readable()
