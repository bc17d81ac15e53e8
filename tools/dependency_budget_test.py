"""The budget follows every edge, and each difference is said."""

import pytest

from paxon.tools import dependency_budget
from paxon.tools.dependencies import planted

_LOCK = """
flax==0.12.8 \\
    --hash=sha256:00
    # via -r requirements.in
jax==0.10.2 \\
    --hash=sha256:01
    # via flax
numpy==2.4.6 \\
    --hash=sha256:02
    # via jax
pytest==9.2.0 \\
    --hash=sha256:03
    # via -r requirements.in
"""
_CHANGES = {
  "third_party/python/requirements_lock.txt": _LOCK,
  **planted.build("sharding", "@pypi//:numpy", "@pypi//:jax"),
}


def test_the_closure_of_targets_and_of_wheels_is_measured(tmp_path):
  planted.write(tmp_path, _CHANGES)
  numpy_and_jax = frozenset({"jax", "numpy"})
  assert dependency_budget.measure(tmp_path) == {
    "//sharding:axes": numpy_and_jax,
    "//layers:block": numpy_and_jax,
    "//learners:adamw": frozenset(),
    "//runner:task": numpy_and_jax,
  }


def test_what_is_written_is_read_back(tmp_path):
  planted.write(tmp_path, _CHANGES)
  budget = dependency_budget.measure(tmp_path)
  text = dependency_budget.render(budget)
  assert "\n//layers:block jax numpy\n//learners:adamw\n" in text
  assert dependency_budget.parse(text) == budget


def test_a_workspace_is_held_against_its_file(tmp_path):
  agreed = "//layers:block flax jax\n//learners:adamw\n//runner:main jax\n"
  planted.write(tmp_path, {**_CHANGES, dependency_budget.PATH: agreed})
  assert dependency_budget.check(tmp_path) == [
    "//layers:block drags in more than agreed: numpy.",
    "//layers:block drags in less than agreed: flax.",
    "//runner:main is in the budget, but is no public target.",
    "//runner:task is not in the budget; it drags in jax, numpy.",
    "//sharding:axes is not in the budget; it drags in jax, numpy.",
  ]


@pytest.mark.parametrize("arguments", [["--fix"], ["--update", "x"]])
def test_refuses_what_it_does_not_know(capsys, arguments):
  assert dependency_budget.main(arguments) == 2
  assert "takes --update only" in capsys.readouterr().out
