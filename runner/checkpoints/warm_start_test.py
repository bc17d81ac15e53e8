"""Tests for what a warm start refuses by itself."""

import fiddle as fdl
import pytest

from paxon.runner.checkpoints import warm_start


def test_only_the_checkpoint_is_required():
  start = fdl.build(fdl.Config(warm_start.WarmStart, checkpoint="runs/base"))
  assert start == warm_start.WarmStart(checkpoint="runs/base")
  assert (start.step, start.patterns, start.may_be_missing) == (None, (), ())
  assert not any((start.averaged, start.cast, start.training_state))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"checkpoint": " "}, r"WarmStart\.checkpoint is empty"),
    ({"step": -1}, r"WarmStart\.step must not be negative, got -1"),
    (
      {"patterns": (("params/(", None),)},
      r"WarmStart\.patterns\[0\] is no regular expression: 'params/\('",
    ),
    (
      {"patterns": (("a", None), ("b(.)", r"\2"))},
      r"WarmStart\.patterns\[1\] has the template '.*' of 1 groups: invalid",
    ),
    (
      {"may_be_missing": ("params/.*", "*")},
      r"WarmStart\.may_be_missing\[1\] is no regular expression: '\*'",
    ),
    (
      {"averaged": True, "training_state": True},
      r"averaged and WarmStart\.training_state are both set",
    ),
  ],
)
def test_what_is_wrong_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    warm_start.WarmStart(**{"checkpoint": "runs/base", **fields})
