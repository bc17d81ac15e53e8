"""Tests for derived random keys."""

import itertools

import jax
import numpy as np

from paxon.learners import random_keys


def _data(seed, step, stream):
  key = random_keys.key_for(seed, step=step, stream=stream)
  return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_differs_by_seed_step_and_stream():
  keys = {
    _data(seed, step, stream)
    for seed, step, stream in itertools.product(
      (0, 1), (0, 1, 1000), ("dropout", "noise")
    )
  }
  assert len(keys) == 12


def test_is_the_same_in_every_process_and_version():
  # Another value here would change every run that is resumed.
  assert _data(7, 3, "dropout") == (2685232904, 4161269239)
  # From the definition, with the checksum as `crc32 <(printf dropout)` has it.
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 3), 0x9289EFC9)
  assert _data(7, 3, "dropout") == tuple(jax.random.key_data(key).tolist())


def test_traced_step_gives_the_same_key():
  @jax.jit
  def traced(step):
    return jax.random.key_data(
      random_keys.key_for(5, step=step, stream="dropout")
    )

  assert tuple(np.asarray(traced(11)).tolist()) == _data(5, 11, "dropout")
