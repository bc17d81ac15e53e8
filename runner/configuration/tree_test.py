"""Tests for walks through configurations."""

import dataclasses
from typing import Any

import fiddle as fdl
from flax import linen as nn
import pytest

from paxon.runner import toy_experiment
from paxon.runner.configuration import rewrites, tree


@dataclasses.dataclass
class _Node:
  a: "int"
  b: "Missing" = None  # pyrefly: ignore
  c: list = dataclasses.field(default_factory=list)


def _function(x: int, *rest: int, y: float = 2.0, **more: int) -> None: ...


def test_fields_are_those_of_the_signature():
  assert tree.field_names(fdl.Config(_function)) == ["x", "y"]
  assert tree.field_names(fdl.Config(_function, other=3)) == ["x", "y", "other"]
  names = tree.field_names(fdl.Config(nn.Dense))
  assert names[:2] == ["features", "use_bias"]
  assert not {"parent", "name"} & set(names)
  # `name` is hidden for modules only.
  assert tree.field_names(fdl.Config(toy_experiment.task.Task))[0] == "name"


def test_values_are_given_or_default():
  node = fdl.Config(_Node)
  assert tree.get_value(node, "a") is fdl.NO_VALUE
  assert (tree.get_value(node, "b"), tree.get_value(node, "c")) == (None, [])
  node.a = 0
  assert (tree.is_set(node, "a"), tree.is_set(node, "b")) == (True, False)
  assert tree.get_value(node, "a") == 0


def test_annotations_that_cannot_be_evaluated_are_left_out():
  assert tree.get_annotations(fdl.Config(_Node)) == {"a": int, "c": list}
  assert tree.get_annotations(fdl.Config(_function))["y"] is float
  assert tree.get_annotations(fdl.Config(nn.Dense))["features"] is int


@pytest.mark.parametrize(
  ("path", "step", "joined"),
  [
    ("", "a", "a"),
    ("a", "b", "a.b"),
    ("a", 0, "a[0]"),
    ("a", "b-c", "a['b-c']"),
  ],
)
def test_paths_read_like_source(path, step, joined):
  assert tree.join(path, step) == joined


def test_places_of_a_shared_part_are_all_found():
  config = toy_experiment.Toy().job()
  head = config.task.model.head
  assert tree.places(config, head) == [
    "task.model.layers[0]",
    "task.model.head",
  ]
  assert ("", config) == next(tree.nodes(config))


def _make(dtype: Any = None) -> Any:
  return dtype


def test_compute_dtype_is_set_in_classes_that_leave_it_open():
  explicit = fdl.Config(toy_experiment.Layer, dtype=None)
  config = fdl.Config(
    toy_experiment.Model,
    layers=(explicit, fdl.Config(toy_experiment.Layer)),
    head=fdl.Config(_make),
  )
  assert rewrites.set_dtype(config, "bfloat16") == ["layers[1]"]
  assert config.layers[1].dtype.name == "bfloat16"
  assert explicit.dtype is None
  assert config.head.dtype is None
