"""Tests for how two checkpoints differ."""

import math

from etils import epath
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paxon.runner.checkpoints import (
  checkpointer,
  comparison,
  stored_arrays,
  stored_checkpoint,
)
from paxon.sharding import variables

SAME = {
  "params/same": np.arange(6, dtype=np.float32).reshape(2, 3),
  "params/half": np.ones((4,), ml_dtypes.bfloat16),
  "step": np.asarray(3, np.int32),
}
A = SAME | {
  "params/other": np.asarray([1.0, -4.0, 2.0], np.float32),
  "params/wide": np.zeros((2, 4), np.float32),
  "params/typed": np.zeros((2,), np.float32),
  "opt/mu/a": np.zeros((2,), np.float32),
  "opt/mu/b": np.zeros((2,), np.float32),
}
B = SAME | {
  "params/other": np.asarray([1.0, -4.5, 2.0], np.float32),
  "params/wide": np.zeros((2, 5), np.float32),
  "params/typed": np.zeros((2,), np.int32),
  "params/new": np.zeros((1,), np.float32),
}


def _save(folder, arrays):
  specs = [
    variables.VariableSpec(name, x.shape, x.dtype, (None,) * x.ndim)
    for name, x in arrays.items()
  ]
  with checkpointer.Checkpointer(epath.Path(folder)) as checkpoints:
    values = [jnp.asarray(x) for x in arrays.values()]
    checkpoints.save(1, values, specs=specs, data={})
  return stored_checkpoint.find(epath.Path(folder))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return tuple(
    _save(tmp_path_factory.mktemp(name) / "c", arrays)
    for name, arrays in (("a", A), ("b", B))
  )


def test_every_kind_of_difference_is_found(pair):
  found = comparison.compare(*pair)
  assert found.only_a == ("opt/mu/a", "opt/mu/b")
  assert found.only_b == ("params/new",)
  assert found.unlike == ("params/wide", "params/typed")
  assert found.equal == ("params/same", "params/half", "step")
  assert found.different == {
    "params/other": comparison.Difference(
      max_absolute=0.5, relative=0.5 / 4.5, count=1, size=3
    )
  }
  assert not found.is_same


def test_a_checkpoint_equals_itself(pair):
  found = comparison.compare(pair[0], pair[0])
  assert found.is_same
  assert found.equal == tuple(pair[0].arrays)
  assert comparison.lines(found)[-1] == f"equal bit for bit: {len(A)}"


def test_only_a_part_is_compared_if_asked(pair):
  assert comparison.compare(*pair, prefix="params/same").is_same
  assert comparison.compare(*pair, prefix="params").only_a == ()


def test_arrays_are_read_one_pair_at_a_time(pair, monkeypatch):
  asked, read = [], stored_arrays.read_numpy
  monkeypatch.setattr(
    stored_arrays,
    "read_numpy",
    lambda checkpoint, names: (
      asked.append(list(names)) or read(checkpoint, names)
    ),
  )
  comparison.compare(*pair)
  # What cannot be equal is not read.
  names = ["params/same", "params/half", "step", "params/other"]
  assert sorted(asked) == sorted([name] for name in names for _ in range(2))


def test_what_is_printed_names_everything(pair):
  text = "\n".join(comparison.lines(comparison.compare(*pair)))
  for part in (
    "only in a: 2\n  opt/*  2 arrays  16 B",
    "only in b: 1\n  params/new  float32[1]  4 B",
    "of another shape or dtype: 2",
    "params/wide   float32[2,4]  float32[2,5]",
    "params/typed  float32[2]    int32[2]",
    "params/other        0.5     0.111  1 of 3",
    "equal bit for bit: 3",
  ):
    assert part in text


def test_differences_over_many_pieces(monkeypatch):
  monkeypatch.setattr(comparison, "_PIECE", 7)
  random = np.random.default_rng(0)
  x = random.normal(size=(5, 11)).astype(np.float32)
  y = x.copy()
  y[1, 2] += 3
  y[4, 10] -= 5
  found = comparison.difference_of(x, y)
  gaps = np.abs(x.astype(np.float64) - y)
  assert (found.count, found.size) == (2, 55)
  assert found.max_absolute == gaps.max()
  assert found.relative == gaps.max() / max(np.abs(x).max(), np.abs(y).max())


def test_bits_count_not_values():
  zero, minus_zero = np.zeros(2, np.float32), -np.zeros(2, np.float32)
  found = comparison.difference_of(zero, minus_zero)
  assert (found.count, found.max_absolute, found.relative) == (0, 0.0, 0.0)
  nan = np.full(2, np.nan, np.float32)
  assert comparison.difference_of(nan, nan.copy()) is None


def test_what_is_not_finite_is_shown():
  x = np.asarray([1.0, np.nan, np.inf], np.float32)
  one_nan = comparison.difference_of(x, np.asarray([1, 2, np.inf], np.float32))
  assert math.isnan(one_nan.max_absolute)
  assert one_nan.count == 1
  infinite = comparison.difference_of(x, np.asarray([2, np.nan, 3], np.float32))
  assert infinite.max_absolute == math.inf
  assert infinite.count == 2
