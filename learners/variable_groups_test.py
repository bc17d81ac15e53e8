"""Tests for groups of variables."""

from flax import traverse_util
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
  assert variable_groups.find_group(spec) is group


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


def _specs_to_freeze():
  return {
    "params": {
      layer: {
        name: testing.spec(f"params/{layer}/{name}", ()) for name in names
      }
      for layer, names in (("attention", ("query",)), ("mlp", ("up", "down")))
    }
  }


@pytest.mark.parametrize(
  ("patterns", "trained"),
  [
    ({}, {"query", "up", "down"}),
    ({"trainable": (".*/mlp/.*",)}, {"up", "down"}),
    ({"frozen": (".*/up", ".*query")}, {"down"}),
    ({"trainable": (".*/mlp/.*",), "frozen": (".*/up",)}, {"down"}),
  ],
)
def test_freeze(patterns, trained):
  specs = _specs_to_freeze()
  frozen = variable_groups.freeze(specs, **patterns)
  kept = variable_groups.select(frozen, Group.OPTIMIZED, specs=frozen)
  names = {path[-1] for path in traverse_util.flatten_dict(kept)}
  assert names == trained


@pytest.mark.parametrize(
  ("patterns", "error"),
  [
    ({"frozen": ("mlp",)}, r"frozen: 'mlp' matches no trained .* whole name"),
    (
      {"trainable": ("(",)},
      r"trainable must be a regular expression, got '\('",
    ),
    ({"frozen": (".*",)}, r"leave no variable to train"),
  ],
)
def test_freeze_rejects(patterns, error):
  with pytest.raises(ValueError, match=error):
    variable_groups.freeze(_specs_to_freeze(), **patterns)
