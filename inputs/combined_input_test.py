"""Tests for combined inputs."""

import json

import numpy as np
import pytest

from paxon.inputs import (
  byte_tokenizer,
  combined_input,
  packed_input,
  synthetic_lm_input,
)
from paxon.inputs.sources import example_source


def _text(rows=4, **kwargs):
  return packed_input.pack_documents(
    source=example_source.InMemoryDocuments(["abc", "defg", "hi" * 20]),
    tokenizer=byte_tokenizer.ByteTokenizer(),
    global_batch_size=rows,
    length=3,
    **{"shuffle_seed": 0, "num_epochs": 1} | kwargs,
  )


def _made(**kwargs):
  defaults = {
    "inputs": {
      "text": _text(),
      "noise": synthetic_lm_input.SyntheticLmInput(
        global_batch_size=8, length=5, vocab_size=9, random_seed=1
      ),
    },
    "default_input": "text",
    "global_batch_size": 4,
    "length": 3,
  }
  return combined_input.CombinedInput(**defaults | kwargs)


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_combines_batches_on_any_hosts(num_hosts):
  whole = list(_made())
  hosts = [_made() for _ in range(num_hosts)]
  for i, host in enumerate(hosts):
    host.set_infeed_hosts(infeed_host_index=i, num_infeed_hosts=num_hosts)
  assert whole[0]["text/inputs"].shape == (4, 3)
  assert whole[0]["noise/inputs"].shape == (4, 2, 5)
  noise = _made().inputs["noise"].get_next()
  np.testing.assert_array_equal(
    whole[0]["noise/inputs"].reshape(8, 5), noise["inputs"]
  )
  for batch in whole:
    rows = [host.get_next() for host in hosts]
    for key, value in batch.items():
      np.testing.assert_array_equal(
        np.concatenate([row[key] for row in rows]), value, err_msg=key
      )


def test_ends_with_the_first_input_and_resumes_anywhere():
  made = _made()
  batches = list(made)
  assert len(batches) == len(list(_text()))
  state = made.get_state()
  # The endless input has not advanced further than the one that ended.
  assert state["noise"]["next"] == len(batches)
  made.reset()
  made.get_next()
  state = json.loads(json.dumps(made.get_state()))
  other = _made()
  other.set_state(state)
  rest = list(other)
  assert len(rest) == len(batches) - 1
  for batch, expected in zip(rest, batches[1:], strict=True):
    for key, value in expected.items():
      np.testing.assert_array_equal(batch[key], value, err_msg=key)


def test_decodes_with_the_input_of_the_key():
  made = _made()
  ids = byte_tokenizer.ByteTokenizer().encode("abc")[None]
  assert made.ids_to_strings(ids, [2]) == ["ab"]
  assert made.ids_to_strings(ids, [3], key="text/targets") == ["abc"]
  with pytest.raises(ValueError, match=r"SyntheticLmInput has no tokenizer"):
    made.ids_to_strings(ids, [2], key="noise/targets")
  assert not made.is_endless
  made.check_readable()


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"default_input": "x"}, r"must be one of \['noise', 'text'\], got 'x'"),
    ({"length": 4}, r"length \(4\) must be that of its default_input, 3"),
    (
      {"inputs": {"text": _text(6)}},
      r"\['text'\].global_batch_size \(6\) must be a multiple of .* \(4\)",
    ),
    ({"inputs": {"text": _text(), "a/b": _text()}}, r"'a/b' must not have"),
  ],
)
def test_rejects_incompatible_inputs(kwargs, message):
  with pytest.raises(ValueError, match=message):
    _made(**kwargs)


def test_rejects_states_of_other_inputs():
  made = _made()
  with pytest.raises(ValueError, match=r"must have the keys \['noise', 'text"):
    made.set_state({"text": {}})
  state = made.get_state()
  state["noise"]["random_seed"] = 2
  with pytest.raises(ValueError, match=r"inputs\['noise'\]: .* random_seed 2"):
    made.set_state(state)
