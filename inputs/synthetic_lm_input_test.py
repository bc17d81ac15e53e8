"""Tests for synthetic batches."""

import numpy as np
import pytest

from paxon.inputs import synthetic_lm_input


def _input(**fields):
  return synthetic_lm_input.SyntheticLmInput(
    **{"global_batch_size": 4, "length": 8, "vocab_size": 50, **fields}
  )


def _assert_same(left, right):
  assert left.keys() == right.keys()
  for key, value in left.items():
    assert value.dtype == right[key].dtype
    np.testing.assert_array_equal(value, right[key], err_msg=key)


def test_ones_are_one_document_per_sequence():
  batch = _input().get_next()
  ones = np.ones((4, 8))
  positions = np.tile(np.arange(8), (4, 1))
  expected = {
    "inputs": ones.astype(np.int32),
    "targets": ones.astype(np.int32),
    "positions": positions.astype(np.int32),
    "segment_ids": ones.astype(np.int32),
    "weights": ones.astype(np.float32),
  }
  _assert_same(batch, expected)


def test_shapes_are_known_without_reading():
  source = _input()
  source.set_infeed_hosts(infeed_host_index=1, num_infeed_hosts=2)
  shapes = source.batch_shapes()
  assert source.get_state()["next"] == 0
  batch = source.get_next()
  assert shapes == {k: (v.shape, v.dtype) for k, v in batch.items()}


def test_a_subclass_has_no_known_shapes():
  class More(synthetic_lm_input.SyntheticLmInput):
    def get_next(self):
      return {**super().get_next(), "more": np.zeros(4)}

  more = More(global_batch_size=4, length=8, vocab_size=50)
  assert more.batch_shapes() is None


def test_random_tokens_fill_the_vocabulary_and_shift_into_targets():
  source = _input(random_seed=3, length=4096)
  batch = source.get_next()
  np.testing.assert_array_equal(
    batch["inputs"][:, 1:], batch["targets"][:, :-1]
  )
  counts = np.bincount(batch["inputs"].ravel(), minlength=50)
  # Each id is expected 328 times, with a standard deviation of 18.
  assert len(counts) == 50
  assert 230 < counts.min() <= counts.max() < 430
  other = source.get_next()
  assert (batch["inputs"] != other["inputs"]).mean() > 0.9
  another = _input(random_seed=4, length=4096).get_next()
  assert (batch["inputs"] != another["inputs"]).mean() > 0.9


def test_random_tokens_match_stored_values():
  # Output of Philox4x64-10 (Salmon et al. 2011), which numpy keeps stable.
  batch = _input(random_seed=3, vocab_size=32000).get_next()
  expected = np.random.Philox(key=[3, 0]).random_raw(4) % 32000
  assert batch["inputs"][0, :4].tolist() == expected.tolist()


@pytest.mark.parametrize("random_seed", [None, 7])
def test_resumes_from_any_batch(random_seed):
  source = _input(random_seed=random_seed)
  batches, states = [], []
  for _ in range(4):
    states.append(source.get_state())
    batches.append(source.get_next())
  for state, batch in zip(states, batches, strict=True):
    restored = _input(random_seed=random_seed)
    restored.set_state(state)
    _assert_same(restored.get_next(), batch)
  source.reset()
  _assert_same(source.get_next(), batches[0])


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_share_the_same_batch(num_hosts):
  whole = _input(random_seed=7)
  parts = [_input(random_seed=7) for _ in range(num_hosts)]
  for index, part in enumerate(parts):
    part.set_infeed_hosts(infeed_host_index=index, num_infeed_hosts=num_hosts)
  for _ in range(2):
    rows = [part.get_next() for part in parts]
    joined = {k: np.concatenate([r[k] for r in rows]) for k in rows[0]}
    _assert_same(joined, whole.get_next())


def test_ends_after_a_number_of_batches():
  source = _input(num_batches=2)
  assert not source.is_endless
  assert _input().is_endless
  assert len(list(source)) == 2
  with pytest.raises(StopIteration):
    source.get_next()
  source.reset()
  assert len(list(source)) == 2


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"vocab_size": 1}, r"vocab_size must be at least 2, got 1"),
    ({"random_seed": -1}, r"random_seed must be in \[0, 2\*\*64\).* got -1"),
    ({"num_batches": 0}, r"num_batches must be positive, got 0"),
    ({"length": 0}, r"SyntheticLmInput\.length must be positive, got 0"),
  ],
)
def test_rejects_invalid_fields(fields, message):
  with pytest.raises(ValueError, match=message):
    _input(**fields)


@pytest.mark.parametrize(
  ("state", "message"),
  [
    ({"next": 1}, r"must have the keys \['next', 'random_seed'\], got"),
    ({"next": 1, "random_seed": 5}, r"saved with random_seed 5, and this"),
    ({"next": True, "random_seed": None}, r"next must be a number.* got True"),
    ({"next": -1, "random_seed": None}, r"next must be a number .* up to 3"),
    ({"next": 4, "random_seed": None}, r"up to 3, got 4"),
  ],
)
def test_rejects_invalid_states(state, message):
  with pytest.raises(ValueError, match=message):
    _input(num_batches=3).set_state(state)
