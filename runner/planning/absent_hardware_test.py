"""Tests that really compile for hardware that is not here.

The compiler for CUDA is here always, that for TPUs under `--config=plan`.
"""

import subprocess
import sys

import pytest

from paxon.runner.configuration import overrides
from paxon.runner.plan import child_process, hardware, target, testing
from paxon.runner.plan.program_text import collectives, hlo
from paxon.runner.planning import child

_TINY = "runner.training.testing.TinyLm"


@pytest.mark.nightly(keep=1)
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
  found = _compile(text, spec, tmp_path / "program.txt")
  assert _sum(found, mesh) == _sum(testing.read_text(file), mesh)


# Every kind but those of other tests: the compiler knows its chip.
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  "text",
  [
    "gb200:2x4",
    *(
      f"{kind.name}:{8 // min(kind.devices_per_host, 8)}"
      f"x{min(kind.devices_per_host, 8)}"
      for kind in map(hardware.find_kind, hardware.names())
      if kind.platform is hardware.Platform.CUDA
      and kind.name not in ("h200", "gb200")
    ),
  ],
)
def test_compiles_for_every_gpu(tmp_path, text):
  found = _compile(text, "fsdp=8", tmp_path / "program.txt")
  stored = testing.read_text("h200_1x8.txt")
  assert _sum(found, {"fsdp": 8}) == _sum(stored, {"fsdp": 8})


def _compile(text, spec, output):
  """Returns the compiled text of a loop of layers."""
  subprocess.run(
    [sys.executable, "-m", testing.__name__, text, spec, str(output)],
    env=child_process.environment(testing.target(text), is_compiled=True),
    capture_output=True,
    check=True,
  )
  return output.read_text()


def _sum(program, mesh):
  """Returns the number of collectives by kind, axes and size."""
  found = collectives.find(hlo.parse(program), mesh=mesh)
  assert found.notes == ()
  totals: dict = {}
  for c in found.collectives:
    key = c.kind, c.axes, c.payload_bytes
    totals[key] = totals.get(key, 0) + c.count
  return totals


def test_traces_for_devices_whose_compiler_needs_them():
  plans = {
    name: child.plan(
      _TINY,
      [],
      target.parse(f"{name}:1x1"),
      is_compiled=False,
      time_limit=600.0,
    )
    for name in ("mi300x", "h200")
  }
  found, stand_in = plans["mi300x"], plans["h200"]
  assert not found.compiled
  assert found.flops == stand_in.flops
  assert found.bound is not None
  assert stand_in.bound is not None
  # 1,307.4 TFLOP/s in AMD's datasheet, 989.4 in NVIDIA's; TinyLm computes in
  # float32: 163.4 and 494.7.
  assert found.bound.compute == pytest.approx(
    stand_in.bound.compute * 494.7 / 163.4
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("text", ["h200:1x1", "v5e:1x1"])
def test_plans_the_real_train_step(text):
  plan = child.plan(
    _TINY, [], testing.target(text), is_compiled=True, time_limit=600.0
  )
  assert plan.compiled
  memory = plan.memory
  assert memory.peak is not None
  assert memory.arguments is not None
  assert memory.state_and_batch <= memory.arguments <= memory.peak
  assert plan.fit == "fits"
  assert plan.bound is not None
  assert plan.bound.step > 0
  # Each product of what was traced is in the text, and none twice.
  assert plan.compiled_flops == pytest.approx(plan.flops.hardware, rel=0.02)
  assert plan.hbm_bytes is not None
  assert plan.hbm_bytes > memory.parameters
  estimate = plan.estimate
  assert estimate is not None, plan.notes
  assert plan.bound.compute < estimate.datasheet_step < estimate.step
  assert estimate.mfu < estimate.datasheet_mfu < estimate.ceiling_mfu


@pytest.mark.nightly
@pytest.mark.parametrize("text", ["h200:1x1", "v5e:1x1"])
def test_an_offloaded_optimizer_is_in_the_memory_of_the_host(text):
  target = testing.target(text)
  memory, offloaded = (
    child.plan(
      _TINY,
      [overrides.Override("task.learner.offload_state", value)],
      target,
      is_compiled=True,
      time_limit=600.0,
    ).memory
    for value in ("false", "true")
  )
  assert memory.host_optimizer == memory.host == 0
  # The counters, such as that of the steps, stay on the device.
  assert 0 < offloaded.optimizer < 32
  moved = offloaded.host_optimizer
  assert moved == memory.optimizer - offloaded.optimizer
  # TPUs pad arrays, in the memory of the host as on the device. What is not on
  # the device any more is all that is on the host.
  assert moved <= offloaded.host
  assert offloaded.host == memory.arguments - offloaded.arguments


@pytest.mark.nightly
@pytest.mark.parametrize("text", ["h200:1x1", "v5e:1x1"])
def test_offloaded_activations_are_not_in_the_memory_of_the_device(text):
  names = '("block_input", "feed_forward_hidden")'
  given = (
    ("embed_dim", "256"),
    ("num_layers", "64"),
    ("global_batch_size", "256"),
    ("task.model.stack.remat_policy", f"layers.remat.Offload({names})"),
  )
  plan = child.plan(
    _TINY,
    [overrides.Override(path, value) for path, value in given],
    testing.target(text),
    is_compiled=True,
    time_limit=600.0,
  )
  memory = plan.memory
  assert memory.host is not None
  assert memory.peak is not None
  assert memory.arguments is not None
  # What one layer needs at a time is little beside what all of them save.
  assert memory.arguments < memory.peak < memory.host
  assert sum(found.num_bytes for found in memory.at_peak) <= memory.peak
  assert any(found.module.startswith("DecoderLm") for found in memory.at_peak)
  # All of it goes to the host and comes back.
  rate = hardware.find_kind(plan.device_kind).host_bandwidth
  assert plan.estimate is not None
  assert rate is not None
  assert plan.estimate.step > 2 * memory.host / rate
  assert not any("do not include" in note for note in plan.notes)


def test_a_tpu_program_that_does_not_fit_is_refused():
  target = testing.target("v5e:1x1")
  given = [
    overrides.Override(path, text)
    for path, text in (("embed_dim", "16384"), ("global_batch_size", "8"))
  ]
  plan = child.plan(_TINY, given, target, is_compiled=True, time_limit=600.0)
  assert plan.fit == "does not fit"
  assert plan.memory.compiler_error is not None
  assert "RESOURCE_EXHAUSTED" in plan.memory.compiler_error
