"""Memory of evaluation, decoding and saving in a training run.

While a run evaluates or decodes, the state that only updates use, such as the
optimizer's, stays in memory.
"""

from collections.abc import Callable, Iterator
import math
from typing import Any

import jax

from paxon.runner.generation import generation_program
from paxon.runner.plan import compiled_program, result
from paxon.runner.plan import target as targets
from paxon.runner.planning import compilation
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
    compiled, buffers = compilation.get_compilation(session, target).compile(
      trace()
    )
    sizes = compiled.memory_analysis()
  except Exception as error:
    # The plan of the training step holds without it.
    first = str(error).strip().partition("\n")[0][:_LENGTH]
    return result.OtherProgram(name=name, note=f"not known: {first}")
  assert sizes is not None
  return result.OtherProgram(
    name=name,
    temporaries=sizes.temp_size_in_bytes,
    peak=compiled_program.peak(sizes, target.hardware.platform, buffers) + kept,
  )


def _saving(session: session_lib.Session) -> result.OtherProgram:
  """Returns the copy of the state that a host keeps until it is written."""
  hosts: dict[int, int] = {}
  for spec in jax.tree.leaves(session.state_specs):
    sharding = session.layout.place(spec)
    shard = math.prod(sharding.shard_shape(spec.shape))
    # One replica of each shard is saved.
    first: dict[Any, jax.Device] = {}
    for device, index in sharding.devices_indices_map(spec.shape).items():
      first.setdefault(tuple((i.start, i.stop) for i in index), device)
    for device in first.values():
      host = device.process_index
      hosts[host] = hosts.get(host, 0) + shard * spec.dtype.itemsize
  return result.OtherProgram(name="saving", host=max(hosts.values(), default=0))
