"""Tests for text tables and short lists of names."""

from paxon.runner.checkpoints import text_table

ALL = ("p/a/x", "p/a/y", "p/b/x", "p/b/y", "p/c", "q/d")


def _labels(names, among=ALL):
  return [
    group.label for group in text_table.collapse_names(names, among=among)
  ]


def test_complete_prefix_is_one_group():
  (group, single) = text_table.collapse_names(
    ("p/a/x", "p/c", "p/a/y"), among=ALL
  )
  assert (group.label, group.names) == ("p/a/*", ("p/a/x", "p/a/y"))
  assert (single.label, single.names) == ("p/c", ("p/c",))


def test_shortest_prefix_is_taken():
  assert _labels(ALL[:5]) == ["p/*"]
  assert _labels(ALL) == ["p/*", "q/d"]


def test_incomplete_prefix_is_no_group():
  assert _labels(("p/a/x", "p/b/x")) == ["p/a/x", "p/b/x"]


def test_no_names_are_no_groups():
  assert _labels(()) == []


def test_unknown_names_are_shown_unchanged():
  assert _labels(("z/a", "z/b")) == ["z/a", "z/b"]


def test_columns_are_aligned():
  rows = [("a", "1", "x"), ("bb", "20", "")]
  assert text_table.format_lines(rows, right=(1,)) == ["a    1  x", "bb  20"]
  assert text_table.format_lines([]) == []
