"""Tests for the way from a name and overrides to a job."""

from typing import Any

import numpy as np
import pytest

from paxon.runner import job, toy_experiment, user_error
from paxon.runner.configuration import overrides, resolving

_TOY = "runner.toy_experiment.Toy"


def _resolve(*assignments: str) -> resolving.Resolved:
  given = [overrides.parse_argument(f"--fdl.{text}") for text in assignments]
  return resolving.resolve(_TOY, [each for each in given if each is not None])


def test_knobs_are_set_first_and_paths_after_them():
  path = "task.model.layers[1].width=3"
  for order in ((path, "width=5"), ("width=5", path)):
    resolved = _resolve(*order)
    assert isinstance(resolved.experiment, toy_experiment.Toy)
    layers = resolved.config.task.model.layers
    assert [layer.width for layer in layers] == [5, 3]


def test_a_remark_on_a_shared_part():
  (note,) = _resolve("task.model.head.width=3").notes
  assert "also changes task.model.layers[0]" in note


def test_the_job_is_built():
  assert isinstance(resolving.build(_resolve("seed=3").config), job.Job)


def test_the_name_of_the_class_stays_what_exp_says():
  # The run would be stored under a name that evaluation cannot find.
  message = "^--fdl.experiment=a.B: 'experiment' cannot be overridden"
  with pytest.raises(user_error.UserError, match=message):
    _resolve("experiment=a.B")


@pytest.mark.parametrize(
  ("assignment", "message"),
  [
    ("width=0", r"must be positive,\sgot 0 \(at task\.model\.layers\[0\]\)\.$"),
    ("seed=-1", r"^Job\.seed must not be negative, got -1\.$"),
    ("seed=4294967296", r"^Job\.seed must be less than 2\*\*32, got"),
    (
      "num_train_steps=2147483648",
      r"num_train_steps must be less than 2\*\*31",
    ),
  ],
)
def test_what_a_part_refuses_is_named_with_its_place(assignment, message):
  with pytest.raises(user_error.UserError, match=message):
    resolving.build(_resolve(assignment).config)


@pytest.mark.parametrize("dtype", ["int8", "bool", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("field", ["dtype", "param_dtype"])
def test_a_dtype_that_layers_do_not_compute_in_is_refused(field, dtype):
  message = (
    rf"^task\.model\.layers\[1\]\.{field} must be float32, bfloat16 or"
    rf" float16, got {dtype}\.$"
  )
  with pytest.raises(user_error.UserError, match=message):
    _resolve(f"task.model.layers[1].{field}={dtype}")
  found = _resolve(f"task.model.layers[1].{field}=bfloat16").config
  value = getattr(found.task.model.layers[1], field)
  assert np.dtype(value).name == "bfloat16"


@pytest.mark.parametrize(
  "error", [ZeroDivisionError, OverflowError, ValueError]
)
def test_an_experiment_that_cannot_count_says_where(monkeypatch, error):
  def task(self: Any) -> None:
    raise error("no such number")

  monkeypatch.setattr(toy_experiment.Toy, "task", task)
  message = (
    r"Toy has no valid configuration: no such number \(resolving_test\.py:\d"
  )
  with pytest.raises(user_error.UserError, match=message):
    _resolve()
