"""Tests for groups of variables."""

import pytest

from paxon.learners import testing, variable_groups
from paxon.sharding import variables

Group = variable_groups.Group
OVERWRITE = variables.UpdateRule.OVERWRITE_WITH_GRADIENT
REPLACE = variables.UpdateRule.REPLACE

SPECS = {
  "params": {
    "a": {"kernel": testing.spec("params/a/kernel", (2, 3))},
    "b": {"kernel": testing.spec("params/b/kernel", (2,), trainable=False)},
  },
  "fp8": {"a": {"scale": testing.spec("fp8/a/scale", (), update=OVERWRITE)}},
  "stats": {"mean": testing.spec("stats/mean", (3,), update=REPLACE)},
}
VALUES = {
  "params": {"a": {"kernel": 1}, "b": {"kernel": 2}},
  "fp8": {"a": {"scale": 3}},
  "stats": {"mean": 4},
}


@pytest.mark.parametrize(
  ("update", "trainable", "group"),
  [
    (variables.UpdateRule.OPTIMIZER, True, Group.OPTIMIZED),
    (variables.UpdateRule.OPTIMIZER, False, Group.FROZEN),
    (OVERWRITE, True, Group.OVERWRITTEN),
    (OVERWRITE, False, Group.FROZEN),
    (REPLACE, True, Group.REPLACED),
    (REPLACE, False, Group.REPLACED),
  ],
)
def test_group(update, trainable, group):
  spec = testing.spec("x", (), update=update, trainable=trainable)
  assert variable_groups.group_of(spec) is group


def test_select_prunes_other_groups():
  def select(*groups):
    return variable_groups.select(VALUES, *groups, specs=SPECS)

  assert select(Group.OPTIMIZED) == {"params": {"a": {"kernel": 1}}}
  assert select(Group.OVERWRITTEN) == {"fp8": {"a": {"scale": 3}}}
  assert select(Group.REPLACED, Group.FROZEN) == {
    "params": {"b": {"kernel": 2}},
    "stats": {"mean": 4},
  }


def test_merge_undoes_select():
  parts = [
    variable_groups.select(VALUES, group, specs=SPECS) for group in Group
  ]
  assert variable_groups.merge(*parts) == VALUES


def test_merge_rejects_a_variable_given_twice():
  with pytest.raises(ValueError, match=r"have the variable params/a/kernel"):
    variable_groups.merge({"params": {"a": {"kernel": 1}}}, VALUES)


def test_map_paths_looks_up_the_rest():
  part = {"fp8": {"a": {"scale": 3}}}
  result = variable_groups.map_paths(lambda x, y: x + y, part, VALUES)
  assert result == {"fp8": {"a": {"scale": 6}}}
