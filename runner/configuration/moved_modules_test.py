"""Tests for moved modules."""

import importlib

import pytest

from paxon.runner.configuration import (
  comparison,
  moved_modules,
  text_values,
)


@pytest.mark.parametrize(
  ("before", "now"),
  [
    ("paxon.layers.stack.Stack", "paxon.layers.stacks.stack.Stack"),
    ("layers.rms_norm.RmsNorm", "layers.norms.rms_norm.RmsNorm"),
    (
      "learners.pruning.Pruned(optimizer=paxon.learners.sgd.Sgd())",
      "learners.optimizers.pruning.Pruned("
      "optimizer=paxon.learners.optimizers.sgd.Sgd())",
    ),
    ("mine.layers.stack.Stack", "mine.layers.stack.Stack"),
    ("layers.stack_of_mine.Stack", "layers.stack_of_mine.Stack"),
    ("layers.stack", "layers.stack"),
    (
      "paxon.layers.stacks.stack.Stack",
      "paxon.layers.stacks.stack.Stack",
    ),
  ],
)
def test_only_names_of_moved_modules_change(before, now):
  assert moved_modules.update_names(before) == now


def test_nothing_moved_twice_or_to_where_something_else_was():
  for before, now in moved_modules.MOVED.items():
    assert now not in moved_modules.MOVED, before


def test_stored_run_resumes_after_its_classes_moved():
  before = "layers: paxon.layers.stack.Stack\nlayers.scan = True\n"
  now = "layers: paxon.layers.stacks.stack.Stack\nlayers.scan = True\n"
  assert not comparison.differences(before, now)
  assert comparison.differences(before, now.replace("True", "False"))


def test_flag_may_have_a_name_of_before():
  found = text_values.parse_function(
    "layers.cross_entropy.sigmoid_cross_entropy"
  )
  module = importlib.import_module("paxon.layers.losses.cross_entropy")
  assert found is module.sigmoid_cross_entropy
