"""Random batches of packed documents."""

import numpy as np
import pytest

from paxon.tools.benchmarks import decoder_lm_job


def _input(**fields) -> decoder_lm_job.RandomTokens:
  sizes = {"global_batch_size": 4, "length": 128, "vocab_size": 50}
  return decoder_lm_job.RandomTokens(**{**sizes, **fields})


def test_rows_are_packed_documents():
  batch = _input().get_next()
  real = batch["weights"] == 1
  assert 0.9 < real.mean() < 1
  assert (batch["segment_ids"][~real] == 0).all()
  assert (batch["segment_ids"][real] > 0).all()
  assert batch["segment_ids"].max() > 1
  for segments, positions in zip(
    batch["segment_ids"], batch["positions"], strict=True
  ):
    for segment in set(segments) - {0}:
      places = positions[segments == segment]
      np.testing.assert_array_equal(places, np.arange(len(places)))


def test_targets_are_the_next_tokens():
  batch = _input().get_next()
  inside = batch["weights"][:, 1:] == 1
  np.testing.assert_array_equal(
    batch["inputs"][:, 1:][inside], batch["targets"][:, :-1][inside]
  )
  assert batch["inputs"].max() < 50


def test_a_restored_state_reads_the_same_batches():
  source = _input()
  source.get_next()
  state = source.get_state()
  expected = source.get_next()
  other = _input()
  other.set_state(state)
  np.testing.assert_equal(other.get_next(), expected)
  other.reset()
  first = other.get_next()
  assert (first["inputs"] != expected["inputs"]).any()


def test_hosts_share_a_batch():
  whole = _input().get_next()
  parts = []
  for host in range(2):
    source = _input()
    source.set_infeed_hosts(infeed_host_index=host, num_infeed_hosts=2)
    parts.append(source.get_next()["inputs"])
  np.testing.assert_array_equal(np.concatenate(parts), whole["inputs"])


def test_rejects_the_state_of_another_input():
  with pytest.raises(ValueError, match="needs the key `next` only"):
    _input().set_state({"epoch": 1})
