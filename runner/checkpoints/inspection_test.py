"""Tests for tables and comparisons of checkpoints."""

import math

from etils import epath
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paxon.runner.checkpoints import checkpointer, inspection, stored_checkpoint
from paxon.sharding import variables

ARRAYS = (
  ("step", (), "int32", ()),
  ("params/table", (10, 4), "bfloat16", ("vocab", "embed")),
  ("params/stack/layers/up", (2, 4, 6), "float32", ("layers", None, "mlp")),
  ("params/stack/layers/down", (2, 6, 4), "float32", ("layers", "mlp", None)),
  ("params/head/kernel", (4, 10), "float32", ("embed", "vocab")),
  ("opt_state/0/count", (), "int32", ()),
)


@pytest.fixture
def checkpoint():
  return stored_checkpoint.StoredCheckpoint(
    folder=epath.Path("runs/a/checkpoints"),
    step=12,
    format_version=2,
    time=0.0,
    arrays={
      name: stored_checkpoint.StoredArray(
        name=name, shape=shape, dtype=dtype, axes=axes
      )
      for name, shape, dtype, axes in ARRAYS
    },
  )


def test_table_has_totals(checkpoint):
  lines = [line.split() for line in inspection.explain(checkpoint)]
  up, down = ("params/stack/layers/" + name for name in ("up", "down"))
  assert [" ".join(line) for line in lines] == [
    "runs/a/checkpoints/12: step 12, format version 2, 6 arrays",
    "",
    "name shape dtype axes values size",
    "step [] int32 1 4 B",
    "params 176 624 B",
    "params/table [10,4] bfloat16 vocab embed 40 80 B",
    f"{up} [2,4,6] float32 layers - mlp 48 192 B",
    f"{down} [2,6,4] float32 layers mlp - 48 192 B",
    "params/head/kernel [4,10] float32 embed vocab 40 160 B",
    "opt_state 1 4 B",
    "opt_state/0/count [] int32 1 4 B",
    "total 178 632 B",
  ]


def test_prefix_selects_names(checkpoint):
  shown = inspection.explain(checkpoint, prefix="params/stack/")
  assert [line.split()[0] for line in shown[2:]] == [
    *("name", "params", "params/stack/layers/up", "params/stack/layers/down"),
    "total",
  ]
  assert shown[-1].split() == ["total", "96", "384", "B"]


def test_prefix_ends_at_a_slash(checkpoint):
  assert inspection.select(checkpoint.arrays, "params/he") == {}
  assert list(inspection.select(checkpoint.arrays, "params/head")) == [
    "params/head/kernel"
  ]
  assert list(inspection.select(checkpoint.arrays, "step")) == ["step"]


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
  return stored_checkpoint.find_checkpoint(epath.Path(folder))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  return tuple(
    _save(tmp_path_factory.mktemp(name) / "c", arrays)
    for name, arrays in (("a", A), ("b", B))
  )


def test_every_kind_of_difference_is_found(pair):
  found = inspection.compare(*pair)
  assert found.only_a == ("opt/mu/a", "opt/mu/b")
  assert found.only_b == ("params/new",)
  assert found.unlike == ("params/wide", "params/typed")
  assert found.equal == ("params/same", "params/half", "step")
  assert found.different == {
    "params/other": inspection.Difference(
      max_absolute=0.5, relative=0.5 / 4.5, count=1, size=3
    )
  }
  assert not found.is_same


def test_checkpoint_equals_itself(pair):
  found = inspection.compare(pair[0], pair[0])
  assert found.is_same
  assert found.equal == tuple(pair[0].arrays)
  assert inspection.format_comparison(found)[-1] == f"bitwise equal: {len(A)}"


def test_prefix_restricts_the_comparison(pair):
  assert inspection.compare(*pair, prefix="params/same").is_same
  assert inspection.compare(*pair, prefix="params").only_a == ()


def test_arrays_are_read_one_pair_at_a_time(pair, monkeypatch):
  asked, read = [], stored_checkpoint.read_numpy
  monkeypatch.setattr(
    stored_checkpoint,
    "read_numpy",
    lambda checkpoint, names: (
      asked.append(list(names)) or read(checkpoint, names)
    ),
  )
  inspection.compare(*pair)
  # Arrays that cannot be equal are not read.
  names = ["params/same", "params/half", "step", "params/other"]
  assert sorted(asked) == sorted([name] for name in names for _ in range(2))


def test_printed_comparison_is_complete(pair):
  text = "\n".join(inspection.format_comparison(inspection.compare(*pair)))
  for line in (
    "only in a: 2\n  opt/*  2 arrays  16 B",
    "only in b: 1\n  params/new  float32[1]  4 B",
    "different shape or dtype: 2",
    "params/wide   float32[2,4]  float32[2,5]",
    "params/typed  float32[2]    int32[2]",
    "params/other        0.5     0.111  1 of 3",
    "bitwise equal: 3",
  ):
    assert line in text


def test_differences_over_many_chunks(monkeypatch):
  monkeypatch.setattr(inspection, "_CHUNK", 7)
  random = np.random.default_rng(0)
  x = random.normal(size=(5, 11)).astype(np.float32)
  y = x.copy()
  y[1, 2] += 3
  y[4, 10] -= 5
  found = inspection.find_difference(x, y)
  gaps = np.abs(x.astype(np.float64) - y)
  assert (found.count, found.size) == (2, 55)
  assert found.max_absolute == gaps.max()
  assert found.relative == gaps.max() / max(np.abs(x).max(), np.abs(y).max())


def test_bits_count_not_values():
  zero, minus_zero = np.zeros(2, np.float32), -np.zeros(2, np.float32)
  found = inspection.find_difference(zero, minus_zero)
  assert (found.count, found.max_absolute, found.relative) == (0, 0.0, 0.0)
  nan = np.full(2, np.nan, np.float32)
  assert inspection.find_difference(nan, nan.copy()) is None


def test_non_finite_values_are_counted():
  x = np.asarray([1.0, np.nan, np.inf], np.float32)
  one_nan = inspection.find_difference(
    x, np.asarray([1, 2, np.inf], np.float32)
  )
  assert math.isnan(one_nan.max_absolute)
  assert one_nan.count == 1
  infinite = inspection.find_difference(
    x, np.asarray([2, np.nan, 3], np.float32)
  )
  assert infinite.max_absolute == math.inf
  assert infinite.count == 2
