"""Plans one job on one target: traces, compiles and reads its train step.

Nothing is computed and no array is made. The target's variables must be set and
its compiler installed, see `topology`.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import math

import jax

from paxon.layers.attention import cudnn_attention
from paxon.runner import job as job_lib
from paxon.runner.plan import (
  compiled_program,
  compiler_options,
  plan_assembly,
  result,
  saved,
  topology,
)
from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import target as targets
from paxon.runner.planning import compilation, decode_step, other_programs
from paxon.runner.session import compiled_steps, kernel_checks
from paxon.runner.session import session as session_lib
from paxon.sharding import host_memory, variables


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
  step = _measure_train_step(session, target, is_compiled=is_compiled)
  serving = session
  if served is not None:
    serving = session_lib.open_session(served, devices=devices)
  others: tuple[result.OtherProgram, ...] = ()
  if with_other_programs and step.program.is_compiled:
    others = other_programs.measure(serving, target)
  return _make_plan(
    step,
    experiment=experiment,
    overrides=tuple(overrides),
    others=others,
    decode_steps=decode_step.measure_all(
      serving, target, decode_steps, is_compiled=is_compiled
    ),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TrainStep:
  """The training step of a job on a target.

  Attributes:
    session: The job on the target's devices, or on those that stand in for
      them.
    target: The target.
    obstacles: Why the step cannot be compiled, in sentences; none if it can.
    flops: Of the traced step.
    memory: As the compiler reports it, or from shapes if it is not compiled.
    program: The compiled step; empty if it is not compiled.
    quantized: Its matmuls that a quantization recipe covers.
  """

  session: session_lib.Session
  target: targets.Target
  obstacles: tuple[str, ...]
  flops: flops_lib.Flops
  memory: result.Memory
  program: compiled_program.Program
  quantized: tuple[result.QuantizedMatmul, ...]

  @property
  def batch_shape(self) -> tuple[int, ...] | None:
    """Shape of a global batch of `inputs`; None without them."""
    inputs = self.session.batch.get("inputs")
    return None if inputs is None else inputs.shape


def _measure_train_step(
  session: session_lib.Session, target: targets.Target, *, is_compiled: bool
) -> _TrainStep:
  """Traces, compiles and reads the training step.

  Raises:
    UserError: It has other kernels than expected.
  """
  traced, obstacles = _trace(session)
  flops = flops_lib.count(traced.jaxpr)
  memory = _sizes_from_shapes(session, target)
  program = compiled_program.Program(target)
  if is_compiled and not obstacles:
    settings = compilation.get_compilation(session, target)
    memory = program.compile(settings, traced, memory, flops)
    if not program.notes:
      kernel_checks.check_expected(
        session.job,
        program.kernel_choices,
        platform=target.hardware.platform,
        quantized=program.quantized_matmuls(flops),
      )
  saved_values = saved.measure_saved(traced.jaxpr, shards=session.layout.shards)
  return _TrainStep(
    session=session,
    target=target,
    obstacles=obstacles,
    flops=flops,
    memory=dataclasses.replace(memory, saved=saved_values),
    program=program,
    quantized=program.quantized_matmuls(flops),
  )


def _make_plan(
  step: _TrainStep,
  *,
  experiment: str,
  overrides: tuple[str, ...],
  others: tuple[result.OtherProgram, ...],
  decode_steps: tuple[result.DecodeStep, ...],
) -> result.Plan:
  """Returns the plan of a training step, and of what else was planned."""
  session, target = step.session, step.target
  options = compiler_options.resolve_for_hardware(
    session.job.compiler_options,
    target.hardware,
    num_devices=target.num_devices,
    sets=session.job.compiler_option_sets,
  )
  found = plan_assembly.make_plan(
    step.program,
    step.flops,
    step.memory,
    target=target,
    name=experiment,
    mesh=session.layout.mesh.shape,
    batch_shape=step.batch_shape,
    quantized=step.quantized,
    obstacles=step.obstacles,
  )
  return dataclasses.replace(
    found,
    overrides=overrides,
    batch={name: tuple(x.shape) for name, x in session.batch.items()},
    compiler_options=compiler_options.to_text(options),
    num_parameters=session.num_parameters(),
    other_programs=others,
    decode_steps=decode_steps,
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
      " pip install 'paxon[plan,plan-cudnn]', or with Bazel: bazel run"
      " --config=plan_cudnn //runner:main -- --mode=plan ...",
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
