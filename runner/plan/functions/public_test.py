"""The names of `import paxon`, and what they load."""

import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import paxon
from paxon.runner.plan import result
from paxon.runner.plan.functions import public

_BLOCK = """
import sys
for name in ("absl", "etils", "fiddle", "flax", "optax", "orbax", "rich"):
  sys.modules[name] = None
"""


def _run(code):
  done = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    check=False,
    env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"},
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_import_loads_nothing():
  code = "import sys; before = set(sys.modules); import paxon\n"
  code += "top = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
  code += "print(sorted(top - set(sys.stdlib_module_names)))"
  assert _run(code).strip() == "['paxon']"


def test_a_function_is_planned_without_the_libraries_of_training():
  code = _BLOCK + (
    "import paxon, jax\n"
    "x = jax.ShapeDtypeStruct((4, 8), 'float32')\n"
    "found = paxon.plan(lambda x: x + 1, x, target='cpu:1')\n"
    "print(found.memory.arguments)\n"
  )
  assert _run(code).split()[-1] == str(4 * 8 * 4)


def test_names_are_found_and_documented():
  assert {"plan", "assert_plan"} <= set(dir(paxon))
  assert paxon.plan is public.plan
  names = list(inspect.signature(paxon.plan).parameters)
  assert names[:3] == ["function", "arguments", "target"]
  assert "hardware you don't have" in inspect.getdoc(paxon.plan.__call__)
  with pytest.raises(AttributeError, match=r"paxon.*'plam'"):
    _ = paxon.plam


def test_plan_has_the_memory_that_jax_reports():
  def step(x, y):
    return jnp.tanh(x @ y).sum()

  x = jax.ShapeDtypeStruct((256, 512), jnp.float32)
  y = jax.ShapeDtypeStruct((512, 128), jnp.float32)
  found = paxon.plan(step, x, y, target="cpu:1")
  sizes = jax.jit(step).lower(x, y).compile().memory_analysis()
  assert isinstance(found, result.Plan)
  assert found.memory.arguments == sizes.argument_size_in_bytes
  assert found.memory.temporaries == sizes.temp_size_in_bytes


def test_devices_are_those_of_the_target():
  assert len(paxon.plan.devices("cpu:8")) == 8
