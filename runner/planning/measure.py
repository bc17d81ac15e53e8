"""Plans one job on one target: traces, compiles and reads its train step.

Nothing is computed and no array is made. The target's variables must be set and
its compiler installed, see `topology`.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import importlib.metadata
import math

import jax

from paxon.layers.attention import cudnn_attention
from paxon.runner import job as job_lib
from paxon.runner import units
from paxon.runner.plan import (
  advice,
  compiler_options,
  result,
  roofline,
  saved,
  topology,
)
from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import quantized_matmuls as quantized_matmuls_lib
from paxon.runner.plan import target as targets
from paxon.runner.planning import compiled_program, decode_step, other_programs
from paxon.runner.session import compiled_steps, kernel_checks
from paxon.runner.session import session as session_lib
from paxon.sharding import host_memory, variables

_DISTRIBUTIONS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")


def measure(
  job: job_lib.Job,
  target: targets.Target,
  *,
  experiment: str,
  overrides: Iterable[str] = (),
  is_compiled: bool = True,
  with_other_programs: bool = False,
  decode_steps: Sequence[tuple[int, int]] = (),
  served: job_lib.Job | None = None,
) -> result.Plan:
  """Plans a job.

  Args:
    job: The resolved configuration.
    target: Target to plan for. To trace only, `num_devices` CPU devices stand
      in for its devices.
    experiment: Its name, for the plan.
    overrides: Assignments of the command line, for the plan.
    is_compiled: Whether to compile, or to trace only.
    with_other_programs: Whether to compile evaluation and decoding too.
    decode_steps: Number of sequences and slots of their caches, for each
      decoding step to plan.
    served: The job with quantized weights, for evaluation and decoding; None
      uses those of training.

  Returns:
    The plan, without the findings of the lint.

  Raises:
    UserError: The mesh does not fit the target, a size does not divide, or the
      step has other kernels than expected.
  """
  kernel_checks.check_attention(
    job, platform=target.hardware.platform.value, where=target.text
  )
  devices = topology.devices(target) if is_compiled else jax.devices("cpu")
  session = session_lib.open_session(job, devices=devices)
  traced, obstacles = _trace(session)
  flops = flops_lib.count(traced.jaxpr)
  memory = _sizes_from_shapes(session, target)
  mesh = session.layout.mesh
  program = compiled_program.Program(target, session)
  if is_compiled and not obstacles:
    memory = program.compile(traced, memory, flops)
    if not program.notes:
      kernel_checks.check_expected(
        job,
        program.kernel_choices,
        platform=target.hardware.platform,
        quantized=program.quantized_matmuls(flops),
      )
  serving = session
  if served is not None:
    serving = session_lib.open_session(served, devices=devices)
  others: tuple[result.OtherProgram, ...] = ()
  if with_other_programs and program.is_compiled:
    others = other_programs.measure(serving, target)
  steps = decode_step.measure_all(
    serving, target, decode_steps, is_compiled=is_compiled
  )
  memory = dataclasses.replace(
    memory,
    saved=saved.measure_saved(traced.jaxpr, shards=session.layout.shards),
  )
  kind = target.hardware
  quantized = program.quantized_matmuls(flops)
  collectives = roofline.summarize(
    program.reading.communication.collectives,
    kind=kind,
    placement=program.placement,
  )
  is_known = program.reading.is_communication_known
  inputs = session.batch.get("inputs")
  shape = None if inputs is None else inputs.shape
  is_rows = shape is not None and len(shape) > 1
  notes = [*obstacles, *flops.notes, *program.reading.notes]
  if program.is_compiled:
    notes += compiler_options.differences(kind.platform)
  estimate, reasons = program.estimate(flops, shape)
  notes += [*reasons, *dict.fromkeys(program.notes)]
  if memory.host_optimizer:
    notes.append(
      f"The times do not include {units.size(2 * memory.host_optimizer)} that a"
      " step copies between a device and its host."
    )
  return result.Plan(
    experiment=experiment,
    overrides=tuple(overrides),
    target=target.text,
    device_kind=kind.name,
    num_devices=target.num_devices,
    num_chips=target.num_chips,
    mesh={name: size for name, size in mesh.shape.items() if size > 1},
    batch={name: tuple(x.shape) for name, x in session.batch.items()},
    compiled=program.is_compiled,
    memory=memory,
    flops=result.Flops(
      model=flops.model_flops,
      causal_model=flops.causal_model_flops(shape[1]) if is_rows else None,
      hardware=flops.hardware_flops,
      recomputed=flops.hardware_flops - flops.model_flops - flops.bubble_flops,
      bubble=flops.bubble_flops,
      by_module=flops.count_by("part"),
      by_dtype=flops.count_by("dtype"),
    ),
    collectives=collectives,
    kernels=program.reading.communication.kernels,
    kernel_choices=program.kernel_choices,
    quantized_matmuls=quantized,
    compiler_options=compiler_options.to_text(
      compiler_options.resolve_for_hardware(
        job.compiler_options,
        kind,
        num_devices=target.num_devices,
        sets=job.compiler_option_sets,
      )
    ),
    bound=roofline.compute_bound(
      flops,
      kind=kind,
      num_devices=target.num_devices,
      collectives=collectives if is_known else None,
      traffic=program.traffic,
      batch_shape=shape,
    ),
    estimate=estimate,
    hbm_bytes=program.reading.hbm_bytes,
    compiled_flops=program.reading.compiled_flops,
    warnings=(
      *program.reading.warnings,
      *quantized_matmuls_lib.warnings(quantized),
      *advice.advise_on_waiting(estimate, collectives, platform=kind.platform),
    ),
    num_parameters=session.num_parameters(),
    other_programs=others,
    decode_steps=steps,
    fit=memory.fit.value,
    advice=(),
    findings=(),
    notes=tuple(notes),
    fingerprint=program.fingerprint,
    versions=_versions(),
    compile_seconds=program.seconds,
  )


def _trace(
  session: session_lib.Session,
) -> tuple[jax.stages.Traced, tuple[str, ...]]:
  """Traces the training step.

  Args:
    session: The job on the target's devices, or on those that stand in for
      them.

  Returns:
    The step, and why it cannot be compiled, in sentences; none if it can.
  """
  try:
    return compiled_steps.trace_train_step(session), ()
  except cudnn_attention.CudnnMissingError:
    with cudnn_attention.stand_in():
      traced = compiled_steps.trace_train_step(session)
    wheels = topology.missing_for_cudnn()
    names = ", ".join(wheels) or "a cuDNN that JAX finds"
    return traced, (
      "The model's attention is cuDNN's (__cudnn$fmhaSoftmax, decided), for"
      f" which the compiler needs {names}: nothing was compiled, and what is"
      " saved for the backward pass is that of attention by XLA. To compile:"
      " bazel run --config=plan_cudnn //runner:main -- --mode=plan ...",
    )


def _sizes_from_shapes(
  session: session_lib.Session, target: targets.Target
) -> result.Memory:
  """Sizes that follow from shapes and shardings."""
  state = session.abstract_state()
  specs = jax.tree.leaves(session.specs)
  arrays = jax.tree.leaves(state.variables)
  trained = [
    spec.trainable and spec.update is variables.UpdateRule.OPTIMIZER
    for spec in specs
  ]
  pairs = list(zip(arrays, trained, strict=True))
  leaves = jax.tree.leaves(state)
  on_host = _bytes(leaf for leaf in leaves if _is_on_host(leaf))
  return result.Memory(
    parameters=_bytes(array for array, is_trained in pairs if is_trained),
    other_variables=_bytes(a for a, is_trained in pairs if not is_trained),
    optimizer=_bytes(leaves) - _bytes(arrays) - on_host,
    host_optimizer=on_host,
    batch=_bytes(session.batch.values()),
    gradients=sum(
      4 * _size(array) for array, is_trained in pairs if is_trained
    ),
    usable=target.hardware.usable_bytes,
    capacity=target.hardware.memory_bytes,
  )


def _bytes(arrays: Iterable[jax.ShapeDtypeStruct]) -> int:
  return sum(_size(array) * array.dtype.itemsize for array in arrays)


def _is_on_host(array: jax.ShapeDtypeStruct) -> bool:
  return getattr(array.sharding, "memory_kind", None) == host_memory.KIND


def _size(array: jax.ShapeDtypeStruct) -> int:
  """Elements of an array on one device."""
  assert array.sharding is not None
  return math.prod(array.sharding.shard_shape(array.shape))


def _versions() -> Mapping[str, str]:
  found = {}
  for name in _DISTRIBUTIONS:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found
