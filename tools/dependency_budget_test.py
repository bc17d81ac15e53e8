"""The budget follows every edge, and reports each difference."""

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
  size = dependency_budget.Size
  assert dependency_budget.measure(tmp_path) == {
    "//sharding:axes": size(1, numpy_and_jax),
    "//layers:block": size(2, numpy_and_jax),
    "//learners:adamw": size(1, frozenset()),
    "//runner:task": size(3, numpy_and_jax),
  }


def test_lazy_imports_load_no_module(tmp_path):
  source = """\
from typing import TYPE_CHECKING
if TYPE_CHECKING:
  from paxon.layers import block
def f():
  from paxon.layers import block
"""
  planted.write(tmp_path, {**_CHANGES, "runner/task.py": source})
  assert dependency_budget.measure(tmp_path)["//runner:task"].modules == 1


def test_what_is_written_is_read_back(tmp_path):
  planted.write(tmp_path, _CHANGES)
  budget = dependency_budget.measure(tmp_path)
  text = dependency_budget.render(budget)
  assert "\n//layers:block 2 jax numpy\n//learners:adamw 1\n" in text
  assert dependency_budget.parse(text) == budget


def test_a_workspace_is_compared_with_its_file(tmp_path):
  agreed = (
    "//layers:block 1 flax jax\n//learners:adamw 2\n//runner:main 1 jax\n"
  )
  planted.write(tmp_path, {**_CHANGES, dependency_budget.PATH: agreed})
  assert dependency_budget.check(tmp_path) == [
    "//layers:block needs wheels beyond its budget: numpy.",
    "//layers:block no longer needs flax.",
    "//layers:block loads 2 of our modules; its budget is 1.",
    "//runner:main is in the budget, but is no public target.",
    "//runner:task is not in the budget; it needs jax, numpy.",
    "//sharding:axes is not in the budget; it needs jax, numpy.",
  ]


def test_limits_hold_whatever_the_file_says(tmp_path, monkeypatch):
  planted.write(tmp_path, _CHANGES)
  text = dependency_budget.render(dependency_budget.measure(tmp_path))
  (tmp_path / "tools").mkdir()
  (tmp_path / dependency_budget.PATH).write_text(text)
  assert dependency_budget.check(tmp_path) == []
  monkeypatch.setitem(dependency_budget.MAX_MODULES, "//layers:block", 1)
  assert dependency_budget.check(tmp_path) == [
    "//layers:block loads 2 of our modules; its limit is 1."
  ]


@pytest.mark.parametrize("arguments", [["--fix"], ["--update", "x"]])
def test_rejects_unknown_arguments(capsys, arguments):
  assert dependency_budget.main(arguments) == 2
  assert "the only option is --update" in capsys.readouterr().out
