"""Plans one job on one target: traces, compiles and reads its train step.

Nothing is computed and no array is made. The target's variables must be set and
its compiler installed, see `topology`.
"""

from collections.abc import Iterable, Mapping
import hashlib
import importlib.metadata
import math
import re
import time
from typing import Any

import jax

from paxon.runner import job as job_lib
from paxon.runner.plan import advice, hardware, result, roofline, topology
from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import target as targets
from paxon.runner.plan.program_text import collectives as collectives_lib
from paxon.runner.plan.program_text import hlo
from paxon.runner.programs import compiled_steps
from paxon.runner.programs import session as session_lib
from paxon.sharding import axes, variables
from paxon.sharding import mesh as meshes

_SOURCE = re.compile(r",? ?metadata=\{[^}]*\}")
_DISTRIBUTIONS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")


def measure(
  job: job_lib.Job,
  target: targets.Target,
  *,
  experiment: str,
  overrides: Iterable[str] = (),
  is_compiled: bool = True,
) -> result.Plan:
  """Plans a job.

  Args:
    job: The resolved configuration.
    target: What to plan for. To trace only, `num_devices` CPU devices stand in
      for its devices.
    experiment: Its name, for the plan.
    overrides: Assignments of the command line, for the plan.
    is_compiled: Whether to compile, or to trace only.

  Returns:
    The plan, without the findings of the lint.

  Raises:
    UserError: The mesh does not fit the target, or a size does not divide.
  """
  devices = topology.devices(target) if is_compiled else jax.devices("cpu")
  session = session_lib.open_session(job, devices=devices)
  traced = compiled_steps.trace_train_step(session)
  flops = flops_lib.count(traced.jaxpr)
  memory = _closed_form(session, target)
  mesh = session.layout.mesh
  program = _Program(target, session)
  if is_compiled:
    memory = program.compile(traced, memory)
  kind = target.hardware
  collectives = roofline.summarize(
    program.communication.collectives, kind=kind, domains=program.domains
  )
  inputs = session.batch.get("inputs")
  shape = None if inputs is None else inputs.shape
  is_rows = shape is not None and len(shape) > 1
  notes = [*flops.notes, *program.communication.notes]
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
      recomputed=flops.phase(flops_lib.Phase.REMAT),
      by_part=flops.by("part"),
      by_kind=flops.by("kind"),
      by_dtype=flops.by("dtype"),
    ),
    collectives=collectives,
    kernels=program.communication.kernels,
    bound=roofline.bound(
      flops,
      kind=kind,
      num_devices=target.num_devices,
      collectives=collectives,
      traffic=program.traffic,
      batch_shape=shape,
    ),
    fit=memory.fit.value,
    advice=advice.of(memory, flops, mesh=dict(mesh.shape), batch=shape),
    findings=(),
    notes=tuple(notes),
    fingerprint=program.fingerprint,
    versions=_versions(),
    compile_seconds=program.seconds,
  )


def without_sources(text: str) -> str:
  """Returns a compiled text without names of files, lines and operations."""
  # Tables of files and lines stand before the first computation.
  begin = re.search(r"^(?:ENTRY )?%", text, re.MULTILINE)
  return _SOURCE.sub("", text[begin.start() if begin else 0 :])


class _Program:
  """The compiled step; empty until it is compiled."""

  def __init__(
    self, target: targets.Target, session: session_lib.Session
  ) -> None:
    self._target = target
    self._mesh = session.layout.mesh
    full = meshes.MeshSpec.parse(session.job.mesh).resolve(self._mesh.size)
    self._dcn = [axis for axis in axes.MESH_AXES if full.dcn[axis] > 1]
    self.is_compiled = False
    self.domains = [0] * self._mesh.size
    self.communication = collectives_lib.Communication((), {}, ())
    self.fingerprint: str | None = None
    self.seconds: float | None = None
    self.traffic: float | None = None

  def compile(
    self, traced: jax.stages.Traced, memory: result.Memory
  ) -> result.Memory:
    """Compiles, and returns the memory as the compiler sees it."""
    begin = time.monotonic()
    try:
      compiled = topology.compile_for(self._target, traced, self._mesh)
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      self.seconds = time.monotonic() - begin
      return _with(memory, refusal=str(error).splitlines()[0])
    self.seconds = time.monotonic() - begin
    self.is_compiled = True
    text = compiled.as_text() or ""
    stripped = without_sources(text).encode()
    self.fingerprint = hashlib.sha256(stripped).hexdigest()
    self.domains = topology.domains(self._target, self._mesh)
    self.communication = collectives_lib.find(
      hlo.parse(text), mesh=dict(self._mesh.shape), dcn=self._dcn
    )
    sizes = compiled.memory_analysis()
    assert sizes is not None
    self.traffic = float(
      sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    )
    return _with(
      memory,
      arguments=sizes.argument_size_in_bytes,
      temporaries=sizes.temp_size_in_bytes,
      peak=_peak(sizes, self._target.hardware.platform),
    )


def _peak(sizes: Any, platform: hardware.Platform) -> int:
  """Bytes in use at most, arguments included."""
  if platform is hardware.Platform.TPU:
    # Less than the sum, because the compiler reuses arguments' memory.
    return sizes.peak_memory_in_bytes
  # Results that are not donated arguments live beside the temporaries.
  added = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + added


def _with(memory: result.Memory, **fields: Any) -> result.Memory:
  return result.Memory(**vars(memory) | fields)


def _closed_form(
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
  everything = _bytes(jax.tree.leaves(state))
  return result.Memory(
    parameters=_bytes(array for array, is_trained in pairs if is_trained),
    other_variables=_bytes(a for a, is_trained in pairs if not is_trained),
    optimizer=everything - _bytes(arrays),
    batch=_bytes(session.batch.values()),
    gradients=sum(
      4 * _size(array) for array, is_trained in pairs if is_trained
    ),
    usable=target.hardware.usable_bytes,
    capacity=target.hardware.memory_bytes,
  )


def _bytes(arrays: Iterable[jax.ShapeDtypeStruct]) -> int:
  return sum(_size(array) * array.dtype.itemsize for array in arrays)


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
