"""Memory of evaluation, decoding and saving in a training run.

While a run evaluates or decodes, the state that only updates use, such as the
optimizer's, stays in memory.
"""

from collections.abc import Callable, Iterator
import math
import pathlib
import tempfile
from typing import Any

import jax

from paxon.runner.generation import generation_program
from paxon.runner.plan import hardware, result, topology
from paxon.runner.plan import target as targets
from paxon.runner.plan.program_text import buffer_assignment
from paxon.runner.session import compiled_steps, memory_fit
from paxon.runner.session import session as session_lib

_LENGTH = 200


def measure(
  session: session_lib.Session, target: targets.Target
) -> tuple[result.OtherProgram, ...]:
  """Compiles the other programs of a run; an error becomes a note.

  Args:
    session: The job on the target's devices.
    target: Its compiler must be installed.
  """
  state = session.abstract_state()
  kept = memory_fit.shard_bytes(state) - memory_fit.shard_bytes(
    session_lib.strip_for_evaluation(state)
  )
  found = [
    _compile(name, trace, session, target, kept=kept)
    for name, trace in _programs(session)
  ]
  return (*found, _saving(session))


def _programs(
  session: session_lib.Session,
) -> Iterator[tuple[str, Callable[[], jax.stages.Traced]]]:
  inputs = session.job.eval_inputs
  shapes = []
  for split, source in inputs.items():

    def trace(source: Any = source) -> jax.stages.Traced:
      batch = session_lib.abstract_batch(source, session.layout)
      return compiled_steps.trace_eval_step(session, batch)

    name = "evaluation" if len(inputs) == 1 else f"evaluation of {split}"
    # Splits with batches of the same shape share their program.
    shape = (source.global_batch_size, source.length)
    if shape not in shapes:
      shapes.append(shape)
      yield name, trace
  job = session.job
  if (
    job.generation is not None
    and generation_program.generation_problem(job) is None
  ):
    yield "decoding", lambda: generation_program.trace(session)


def _compile(
  name: str,
  trace: Callable[[], jax.stages.Traced],
  session: session_lib.Session,
  target: targets.Target,
  *,
  kept: int,
) -> result.OtherProgram:
  try:
    compiled, buffers = compile_program(session, target, trace())
    sizes = compiled.memory_analysis()
  except Exception as error:
    # The plan of the training step holds without it.
    first = str(error).strip().partition("\n")[0][:_LENGTH]
    return result.OtherProgram(name=name, note=f"not known: {first}")
  assert sizes is not None
  return result.OtherProgram(
    name=name,
    temporaries=sizes.temp_size_in_bytes,
    peak=peak(sizes, target.hardware.platform, buffers) + kept,
  )


def compile_program(
  session: session_lib.Session,
  target: targets.Target,
  traced: jax.stages.Traced,
) -> tuple[jax.stages.Compiled, buffer_assignment.Buffers | None]:
  """Compiles a program of a job.

  Args:
    session: The job on the target's devices.
    target: Its compiler must be installed.
    traced: The program.

  Returns:
    The program, and its buffers in the memory of the device; None if what the
    compiler writes about them cannot be read.
  """
  job = session.job
  with tempfile.TemporaryDirectory(prefix="paxon-plan-") as name:
    folder = pathlib.Path(name)
    compiled = topology.compile_for(
      target,
      traced,
      session.layout.mesh,
      given=job.compiler_options,
      sets=job.compiler_option_sets,
      dump=folder,
    )
    try:
      return compiled, buffer_assignment.read(folder)
    except (buffer_assignment.ReadError, OSError, UnicodeDecodeError):
      return compiled, None


def peak(
  sizes: Any,
  platform: hardware.Platform,
  buffers: buffer_assignment.Buffers | None = None,
) -> int:
  """Returns the peak bytes of a compiled program, arguments included.

  Args:
    sizes: `memory_analysis()` of the program.
    platform: Of its compiler.
    buffers: Its buffers in the memory of the device, if known.
  """
  # Results that are not donated arguments live beside the temporaries.
  added = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  whole = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + added
  if platform is not hardware.Platform.TPU:
    return whole
  if host_bytes(sizes):
    # The compiler's peak is that of the device or of the host, whichever is
    # larger.
    if buffers is None:
      return min(whole, sizes.peak_memory_in_bytes)
    return buffers.peak
  # Less than the sum, because the compiler reuses arguments' memory.
  return sizes.peak_memory_in_bytes


def host_bytes(sizes: Any) -> int:
  """Returns the bytes of host memory of a compiled program, for a device."""
  added = sizes.host_output_size_in_bytes - sizes.host_alias_size_in_bytes
  return (
    sizes.host_argument_size_in_bytes + sizes.host_temp_size_in_bytes + added
  )


def _saving(session: session_lib.Session) -> result.OtherProgram:
  """Returns the copy of the state that a host keeps until it is written."""
  hosts: dict[int, int] = {}
  for spec in jax.tree.leaves(session.state_specs):
    sharding = session.layout.sharding(spec.axes)
    shard = math.prod(sharding.shard_shape(spec.shape))
    # One replica of each shard is saved.
    first: dict[Any, jax.Device] = {}
    for device, index in sharding.devices_indices_map(spec.shape).items():
      first.setdefault(tuple((i.start, i.stop) for i in index), device)
    for device in first.values():
      host = device.process_index
      hosts[host] = hosts.get(host, 0) + shard * spec.dtype.itemsize
  return result.OtherProgram(name="saving", host=max(hosts.values(), default=0))
