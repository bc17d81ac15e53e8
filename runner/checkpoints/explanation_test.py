"""Tests for the tree of what a checkpoint holds."""

from etils import epath
import pytest

from paxon.runner.checkpoints import (
  explanation,
  stored_checkpoint,
  text_table,
)

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
    format_version=1,
    time=None,
    arrays={
      name: stored_checkpoint.StoredArray(
        name=name, shape=shape, dtype=dtype, axes=axes
      )
      for name, shape, dtype, axes in ARRAYS
    },
  )


def test_the_tree_has_totals(checkpoint):
  assert explanation.explain(checkpoint) == [
    "runs/a/checkpoints/12: step 12, format version 1, 6 arrays",
    "",
    "name            shape    dtype     axes          values   size",
    "step            []       int32                        1    4 B",
    "params                                              176  624 B",
    "  table         [10,4]   bfloat16  vocab embed       40   80 B",
    "  stack/layers                                       96  384 B",
    "    up          [2,4,6]  float32   layers - mlp      48  192 B",
    "    down        [2,6,4]  float32   layers mlp -      48  192 B",
    "  head/kernel   [4,10]   float32   embed vocab       40  160 B",
    "opt_state                                             1    4 B",
    "  0/count       []       int32                        1    4 B",
    "total                                               178  632 B",
  ]


def test_a_part_is_shown_alone(checkpoint):
  shown = explanation.explain(checkpoint, prefix="params/stack/")
  assert [line.split()[0] for line in shown[2:]] == [
    *("name", "params", "stack/layers", "up", "down", "total")
  ]
  assert shown[-1].split() == ["total", "96", "384", "B"]


def test_a_prefix_ends_where_a_word_ends(checkpoint):
  assert explanation.within(checkpoint.arrays, "params/he") == {}
  assert list(explanation.within(checkpoint.arrays, "params/head")) == [
    "params/head/kernel"
  ]
  assert list(explanation.within(checkpoint.arrays, "step")) == ["step"]


@pytest.mark.parametrize(
  ("num_bytes", "text"),
  [
    (0, "0 B"),
    (999, "999 B"),
    (1000, "1.0 kB"),
    (999_949, "999.9 kB"),
    (999_950, "1.0 MB"),
    (3 * 10**15, "3000.0 TB"),
  ],
)
def test_sizes_are_in_decimal_units(num_bytes, text):
  assert text_table.size(num_bytes) == text


def test_columns_are_aligned():
  rows = [("a", "1", "x"), ("bb", "20", "")]
  assert text_table.lines(rows, right=(1,)) == ["a    1  x", "bb  20"]
  assert text_table.lines([]) == []
