"""Tests that really compile for hardware that is not here.

They need the compilers, which `--config=plan` brings; without them they are
skipped, except where PAXON_PLAN_COMPILERS says that they must be there.
"""

import os
import subprocess
import sys

import pytest

from paxon.runner.configuration import overrides
from paxon.runner.plan import target as targets
from paxon.runner.plan import testing, topology
from paxon.runner.plan.program_text import collectives, hlo
from paxon.runner.programs.plan import child

_TINY = "runner.programs.testing.TinyLm"


def _target(text):
  target = targets.parse(text)
  missing = topology.missing(target)
  if missing and not os.environ.get("PAXON_PLAN_COMPILERS"):
    pytest.skip(f"needs {' and '.join(missing)}: bazel test --config=plan")
  assert not missing
  return target


@pytest.mark.parametrize(
  ("text", "spec", "mesh", "file"),
  [
    ("h200:1x8", "fsdp=8", {"fsdp": 8}, "h200_1x8.txt"),
    ("v5e:2x4", "fsdp=4,tensor=2", {"fsdp": 4, "tensor": 2}, "v5e_2x4.txt"),
  ],
)
def test_a_loop_communicates_as_in_the_stored_text(
  tmp_path, text, spec, mesh, file
):
  target = _target(text)
  output = tmp_path / "program.txt"
  subprocess.run(
    [sys.executable, "-m", testing.__name__, text, spec, str(output)],
    env=child.environment(target, is_compiled=True),
    capture_output=True,
    timeout=300,
    check=True,
  )

  def sums(program):
    found = collectives.find(hlo.parse(program), mesh=mesh)
    assert found.notes == ()
    totals: dict = {}
    for c in found.collectives:
      key = c.kind, c.axes, c.payload_bytes
      totals[key] = totals.get(key, 0) + c.count
    return totals

  assert sums(output.read_text()) == sums(testing.stored(file))


@pytest.mark.parametrize("text", ["h200:1x1", "v5e:1x1"])
def test_plans_the_real_train_step(text):
  plan = child.plan(
    _TINY, [], _target(text), is_compiled=True, time_limit=600.0
  )
  assert plan.compiled
  memory = plan.memory
  assert memory.peak is not None
  assert memory.arguments is not None
  assert memory.state_and_batch <= memory.arguments <= memory.peak
  assert plan.fit == "fits"
  assert plan.bound is not None
  assert plan.bound.step > 0


def test_a_tpu_program_that_does_not_fit_is_refused():
  target = _target("v5e:1x1")
  given = [
    overrides.Override(path, text)
    for path, text in (("embed_dim", "16384"), ("global_batch_size", "8"))
  ]
  plan = child.plan(_TINY, given, target, is_compiled=True, time_limit=600.0)
  assert plan.fit == "does not fit"
  assert plan.memory.refusal is not None
  assert "RESOURCE_EXHAUSTED" in plan.memory.refusal
  assert plan.advice
