"""Sizes and names of compiled programs, and the plan that is made of them."""

import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner.plan import (
  compiled_program,
  flops,
  hardware,
  plan_assembly,
  result,
)
from paxon.runner.plan import target as targets

_CPU = targets.parse(f"cpu:{jax.device_count()}")


def _plan(function, *shapes, rename=str):
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()),
    ("data",),
    axis_types=(jax.sharding.AxisType.Auto,),
  )
  traced = jax.jit(function).trace(*shapes)
  found = flops.count(traced.jaxpr)
  program = compiled_program.Program(_CPU)
  how = compiled_program.Compilation(target=_CPU, mesh=mesh, rename=rename)
  memory = program.compile(how, traced, result.Memory(), found)
  return plan_assembly.make_plan(
    program, found, memory, target=_CPU, name="f", mesh=mesh.shape
  )


def test_a_plan_has_the_sizes_of_the_compiler():
  x = jax.ShapeDtypeStruct((128, 256), jnp.float32)

  def apply(x):
    return jnp.tanh(x @ x.T) @ x

  plan = _plan(apply, x)
  assert plan.memory.arguments == 128 * 256 * 4
  # The result is no temporary, but is in the memory at the peak.
  assert plan.memory.temporaries >= 128 * 128 * 4
  assert plan.memory.peak == (
    plan.memory.arguments + plan.memory.temporaries + 128 * 256 * 4
  )
  assert plan.flops.model == 2 * 2 * 128 * 128 * 256
  assert plan.num_devices == jax.device_count()
  assert plan.versions["jax"] == jax.__version__


def test_names_in_the_compiled_text_can_be_changed():
  x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  # The buffers of a program from a cache are unknown, and no cache has this.
  factor = random.random()

  def apply(x):
    with jax.named_scope("old"):
      return x @ (factor * x) @ x

  plan = _plan(apply, x, rename=lambda text: text.replace("old", "new"))
  modules = {found.module for found in plan.memory.at_peak}
  assert modules == {"new"}


def test_a_program_that_is_not_compiled_has_its_flops():
  x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  found = flops.count(jax.jit(lambda x: x @ x).trace(x).jaxpr)
  h200 = targets.parse("h200:1x1")
  plan = plan_assembly.make_plan(
    compiled_program.Program(h200),
    found,
    result.Memory(inputs={"x": 64 * 64 * 4}),
    target=h200,
    name="f",
    mesh={"data": 1},
    obstacles=["No compiler."],
  )
  assert not plan.compiled
  assert plan.mesh == {}
  assert plan.memory.state_and_batch == 64 * 64 * 4
  assert plan.notes[0] == "No compiler."
  # The datasheet's 67 TFLOP/s of an H200 in float32 are 494 in TF32.
  assert plan.bound.compute == pytest.approx(2 * 64**3 / 494.5e12, rel=1e-2)


def test_a_matmul_without_tiles_is_compiled_without_triton():
  x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  traced = jax.jit(lambda x: x @ x).trace(x)
  tried = []

  class Fails(compiled_program.Compilation):
    def compile(self, traced):
      tried.append(dict(self.options))
      if not self.options:
        raise jax.errors.JaxRuntimeError(
          "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot"
        )
      return traced.lower().compile(), None

  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  program = compiled_program.Program(_CPU)
  found = flops.count(traced.jaxpr)
  how = Fails(target=_CPU, mesh=mesh)
  program.compile(how, traced, result.Memory(), found)
  assert program.is_compiled
  assert tried == [{}, {"xla_gpu_enable_triton_gemm": False}]
  assert "xla_gpu_enable_triton_gemm=False" in program.notes[0]


def _make_sizes(**sizes):
  names = ("argument", "output", "alias", "temp", "peak_memory")
  names = [f"{name}_size_in_bytes" for name in names[:4]]
  names += ["peak_memory_in_bytes"]
  names += [f"host_{n}_size_in_bytes" for n in ("argument", "output", "alias")]
  names += ["host_temp_size_in_bytes"]
  return types.SimpleNamespace(**dict.fromkeys(names, 0) | sizes)


def test_the_peak_is_the_compilers_or_a_sum():
  sizes = _make_sizes(
    argument_size_in_bytes=100,
    output_size_in_bytes=30,
    alias_size_in_bytes=20,
    temp_size_in_bytes=50,
    peak_memory_in_bytes=140,
  )
  # Of results, 20 bytes are in the arguments' memory.
  assert compiled_program.peak(sizes, hardware.Platform.CUDA) == 160
  # The compiler for TPUs knows better.
  assert compiled_program.peak(sizes, hardware.Platform.TPU) == 140
  host = _make_sizes(
    host_temp_size_in_bytes=7,
    host_output_size_in_bytes=5,
    host_alias_size_in_bytes=4,
    host_argument_size_in_bytes=2,
  )
  assert compiled_program.host_bytes(host) == 10
