"""Tests for the masking of random tokens."""

import jax
import numpy as np
import pytest

from paxon.layers.models import random_masking

VOCAB, MASK, SPECIAL = 50, 49, (0, 7)
MASKING = random_masking.RandomMasking(
  mask_id=MASK, vocab_size=VOCAB, rate=0.3, special_ids=SPECIAL
)
ROWS, LENGTH = 40, 200


def _batch(seed=0):
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, MASK, (ROWS, LENGTH))
  segments = np.where(np.arange(LENGTH) < 150, 1, 0) * np.ones((ROWS, 1), int)
  weights = np.ones((ROWS, LENGTH), np.float32)
  weights[:, :10] = 0
  weights[:, 10:20] = 0.5
  return {
    "inputs": jax.device_put(np.int32(ids)),
    "segment_ids": jax.device_put(np.int32(segments)),
    "weights": jax.device_put(weights),
  }


_mask = jax.jit(lambda batch, key: MASKING(batch, key=key))


def test_shares_are_those_asked_for():
  batch = _batch()
  ids = np.asarray(batch["inputs"])
  masked = jax.device_get(_mask(batch, jax.random.key(1)))
  np.testing.assert_array_equal(masked["targets"], ids)
  allowed = (np.asarray(batch["segment_ids"]) > 0) & ~np.isin(ids, SPECIAL)
  allowed &= np.asarray(batch["weights"]) > 0
  chosen = masked["weights"] > 0
  assert not np.any(chosen & ~allowed)
  np.testing.assert_array_equal(
    masked["weights"][chosen], np.asarray(batch["weights"])[chosen]
  )
  np.testing.assert_array_equal(masked["inputs"][~chosen], ids[~chosen])
  number = allowed.sum()
  np.testing.assert_allclose(chosen.sum() / number, 0.3, atol=0.02)
  now, before = masked["inputs"][chosen], ids[chosen]
  is_mask, stays = now == MASK, now == before
  np.testing.assert_allclose(is_mask.mean(), 0.8 + 0.1 / VOCAB, atol=0.03)
  np.testing.assert_allclose(stays.mean(), 0.1 + 0.1 / VOCAB, atol=0.03)
  # Random ids are of the whole vocabulary.
  assert len(set(now[~is_mask & ~stays].tolist())) > VOCAB // 2


def test_keys_decide():
  batch = _batch()
  one, again, other = (
    _mask(batch, jax.random.key(k))["inputs"] for k in (0, 0, 1)
  )
  np.testing.assert_array_equal(one, again)
  assert np.any(one != other)


def test_without_a_key_each_text_is_masked_alike_wherever_it_stands():
  batch = _batch()
  order = np.random.default_rng(1).permutation(ROWS)
  masked = MASKING(batch, key=None)
  moved = MASKING({k: x[order] for k, x in batch.items()}, key=None)
  for name, x in masked.items():
    np.testing.assert_array_equal(x[order], moved[name])
  # Rows of the same ids in another order are masked otherwise.
  assert len({tuple(row) for row in (masked["weights"] > 0).tolist()}) == ROWS


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"mask_id": 50}, r"mask_id \(50\) must be an id below vocab_size \(50\)"),
    ({"rate": 0.0}, r"RandomMasking\.rate must be in \(0, 1\), got 0\.0"),
    ({"mask_share": 0.95}, r"at most 1 together, got 0\.95 and 0\.1"),
    ({"random_share": -0.1}, r"must not be negative .* 0\.8 and -0\.1"),
  ],
)
def test_rejects_bad_settings(fields, message):
  with pytest.raises(ValueError, match=message):
    random_masking.RandomMasking(**{"mask_id": 1, "vocab_size": 50} | fields)
