"""Tests for short lists of names."""

from paxon.runner.checkpoints import name_groups

ALL = ("p/a/x", "p/a/y", "p/b/x", "p/b/y", "p/c", "q/d")


def _labels(names, among=ALL):
  return [group.label for group in name_groups.collapse(names, among=among)]


def test_a_whole_folder_is_one_group():
  (group, single) = name_groups.collapse(("p/a/x", "p/c", "p/a/y"), among=ALL)
  assert (group.label, group.names) == ("p/a/*", ("p/a/x", "p/a/y"))
  assert (single.label, single.names) == ("p/c", ("p/c",))


def test_the_outermost_folder_is_taken():
  assert _labels(ALL[:5]) == ["p/*"]
  assert _labels(ALL) == ["p/*", "q/d"]


def test_part_of_a_folder_stays_apart():
  assert _labels(("p/a/x", "p/b/x")) == ["p/a/x", "p/b/x"]


def test_no_names_are_no_groups():
  assert _labels(()) == []


def test_names_that_are_not_there_are_shown_as_they_are():
  assert _labels(("z/a", "z/b")) == ["z/a", "z/b"]
