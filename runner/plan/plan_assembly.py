"""Assembles a plan of what is known of a compiled program."""

from collections.abc import Mapping, Sequence
import importlib.metadata
from typing import Final

from paxon.runner import units
from paxon.runner.plan import (
  advice,
  compiled_program,
  compiler_options,
  hardware,
  result,
  roofline,
)
from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import quantized_matmuls as quantized_matmuls_lib
from paxon.runner.plan import target as targets

_DISTRIBUTIONS: Final = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")


def make_plan(
  program: compiled_program.Program,
  flops: flops_lib.Flops,
  memory: result.Memory,
  *,
  target: targets.Target,
  name: str,
  mesh: Mapping[str, int],
  batch_shape: tuple[int, ...] | None = None,
  quantized: tuple[result.QuantizedMatmul, ...] = (),
  obstacles: Sequence[str] = (),
) -> result.Plan:
  """Returns the plan of a program, with what is known of any program.

  Args:
    program: The program; empty if it is not compiled.
    flops: Of the traced program.
    memory: Of a device.
    target: The devices.
    name: Of the experiment or function.
    mesh: Size of each mesh axis.
    batch_shape: Sequences of a step and their length, for tokens per second;
      None if unknown.
    quantized: Matmuls covered by a quantization recipe.
    obstacles: Why the program cannot be compiled, in sentences.
  """
  kind, reading = target.hardware, program.reading
  collectives = roofline.summarize(
    reading.communication.collectives, kind=kind, placement=program.placement
  )
  estimate, reasons = program.estimate(flops, batch_shape)
  notes = _list_notes(
    program, flops, memory, kind, reasons, is_estimated=estimate is not None
  )
  return result.Plan(
    experiment=name,
    overrides=(),
    target=target.text,
    device_kind=kind.name,
    num_devices=target.num_devices,
    num_chips=target.num_chips,
    mesh={axis: size for axis, size in mesh.items() if size > 1},
    batch={},
    compiled=program.is_compiled,
    memory=memory,
    flops=_summarize_flops(flops, batch_shape),
    collectives=collectives,
    kernels=reading.communication.kernels,
    kernel_choices=program.kernel_choices,
    quantized_matmuls=quantized,
    bound=roofline.compute_bound(
      flops,
      kind=kind,
      num_devices=target.num_devices,
      collectives=collectives if reading.is_communication_known else None,
      traffic=program.traffic,
      batch_shape=batch_shape,
    ),
    estimate=estimate,
    hbm_bytes=reading.hbm_bytes,
    compiled_flops=reading.compiled_flops,
    warnings=(
      *reading.warnings,
      *quantized_matmuls_lib.warnings(quantized),
      *advice.advise_on_waiting(estimate, collectives, platform=kind.platform),
    ),
    fit=memory.fit.value,
    advice=(),
    findings=(),
    notes=(*obstacles, *notes),
    fingerprint=program.fingerprint,
    versions=_list_versions(),
    compile_seconds=program.seconds,
  )


def _list_notes(
  program: compiled_program.Program,
  flops: flops_lib.Flops,
  memory: result.Memory,
  kind: hardware.Hardware,
  reasons: Sequence[str],
  *,
  is_estimated: bool,
) -> list[str]:
  """Lists unknown and uncertain facts, one sentence each."""
  notes = [*flops.notes, *program.reading.notes]
  if program.is_compiled:
    notes += compiler_options.differences(kind.platform)
  # Each failed reader has one note, however often it was called.
  notes += [*reasons, *dict.fromkeys(program.notes)]
  # All of it goes to the host and comes back; without a compiler, only the
  # optimizer's share is known.
  on_host = memory.host or memory.host_optimizer
  if on_host and not is_estimated:
    notes.append(
      f"The times do not include {units.size(2 * on_host)} that a step copies"
      " between a device and its host."
    )
  return notes


def _summarize_flops(
  flops: flops_lib.Flops, batch_shape: tuple[int, ...] | None
) -> result.Flops:
  """Sums FLOPs; batches [sequences, length] have a causal model, too."""
  causal_model = None
  if batch_shape is not None and len(batch_shape) > 1:
    causal_model = flops.causal_model_flops(batch_shape[1])
  return result.Flops(
    model=flops.model_flops,
    causal_model=causal_model,
    hardware=flops.hardware_flops,
    recomputed=flops.hardware_flops - flops.model_flops - flops.bubble_flops,
    bubble=flops.bubble_flops,
    by_module=flops.count_by("part"),
    by_dtype=flops.count_by("dtype"),
  )


def _list_versions() -> Mapping[str, str]:
  found = {}
  for name in _DISTRIBUTIONS:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found
