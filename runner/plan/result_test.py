"""Tests for `plan.json`."""

from collections.abc import Mapping
import dataclasses
import json

import pytest

from paxon.runner.plan import result, sample_plan

_FULL = sample_plan.plan(
  advice=("Halve it.",),
  verified_changes=(sample_plan.change(),),
  search=(sample_plan.change(compiled=False),),
)


def test_a_plan_survives_its_file():
  plans = (_FULL, sample_plan.plan(bound=None, estimate=None, fingerprint=None))
  assert result.from_json(result.to_json(plans)) == plans


def test_the_sample_has_a_value_in_every_field():
  # Without it the tests of what shows plans would leave fields out.
  unset = {"memory": {"compiler_error", "inputs"}, "plan": {"is_from_cache"}}
  memory = dataclasses.asdict(_FULL.memory)
  assert {k for k, v in memory.items() if not v} == unset["memory"]
  fields = dataclasses.asdict(_FULL)
  assert {k for k, v in fields.items() if not v} == unset["plan"]


@pytest.mark.parametrize(
  ("kind", "text", "value"),
  [
    (tuple[int, ...], "[1, 2]", (1, 2)),
    (tuple[float, float], "[0.5, 2.0]", (0.5, 2.0)),
    (Mapping[str, tuple[int, ...]], '{"x": [3]}', {"x": (3,)}),
    (result.TrainingCost | None, "null", None),
    (
      result.TrainingCost | None,
      '{"tokens": 1.0, "days": 2.0, "device_hours": 3.0}',
      result.TrainingCost(tokens=1.0, days=2.0, device_hours=3.0),
    ),
  ],
)
def test_reads_values_of_annotated_types(kind, text, value):
  assert result.decode(kind, json.loads(text)) == value


def test_targets_without_a_plan_are_in_the_file():
  failure = result.Failure(target="v5e:4x4", message="heads do not divide.")
  content = json.loads(result.to_json((_FULL,), (failure,)))
  assert content["version"] == result.VERSION
  assert content["failures"] == [
    {"target": "v5e:4x4", "message": "heads do not divide."}
  ]


def test_another_version_is_refused():
  text = json.dumps({"version": 99, "plans": []})
  with pytest.raises(ValueError, match=r"version 99; this program reads"):
    result.from_json(text)
