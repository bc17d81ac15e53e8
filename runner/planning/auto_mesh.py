"""`mesh="auto"`: the mesh that fits and is fastest by analytical estimate.

All ways to share devices out over `data`, `fsdp` and `tensor` are put in order
by what they send, which alone differs between them; the first whose step fits
by the memory forecast is compiled once, where its compiler is here. There is no
clock in this, only counts, so that all hosts of a run choose alike: at most 12
traces of a few seconds, and 2 compilations.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Final

from paxon.runner import job as job_lib
from paxon.runner import units, user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.plan import advice, result, topology
from paxon.runner.plan import target as targets
from paxon.runner.plan.search import communication, cost, meshes
from paxon.runner.planning import child, job_lint, mesh_figures, tracer
from paxon.sharding import mesh as mesh_lib

_PATH: Final = "mesh"
_MAX_TRACES: Final = 12
_MAX_COMPILES: Final = 2
_SECONDS: Final = 600.0

Planner = Callable[[str], result.Plan | result.Failure]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """A mesh, and why.

  Attributes:
    mesh: As it is typed.
    reason: For a reader, in half a sentence.
  """

  mesh: str
  reason: str

  @property
  def line(self) -> str:
    """What to print."""
    return f"mesh=auto: {self.mesh or 'one device'}, {self.reason}"

  def overrides(
    self, given: Sequence[overrides_lib.Override]
  ) -> tuple[overrides_lib.Override, ...]:
    """Returns assignments with the mesh in place of those that there are."""
    return (
      *(override for override in given if override.path != _PATH),
      overrides_lib.Override(_PATH, self.mesh),
    )


def choose(
  job: job_lib.Job,
  *,
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  target: targets.Target,
) -> Choice:
  """Chooses a mesh for a target.

  Args:
    job: The resolved configuration; its mesh is not looked at.
    experiment: As `--exp` takes it.
    overrides: Assignments of the command line.
    target: The devices, which may be absent.

  Raises:
    UserError: The batch or the variables divide by no mesh, or nothing fits.
  """
  shapes = job_lint.shapes_of(job)
  figures = mesh_figures.MeshFigures(job, shapes, target)
  ranked = _ranked(job, figures, target)
  usable = target.hardware.usable_bytes
  if usable is None:
    sends = f"sends least of {_meshes(ranked)} that divide the batch"
    return Choice(mesh=ranked[0], reason=f"which {sends}")
  fitting = [mesh for mesh in ranked if figures.state(mesh) <= usable]
  if not fitting:
    least = min(figures.state(mesh) for mesh in ranked)
    raise _nothing_fits(target, _meshes(ranked), least, figures, usable)

  def with_mesh(mesh: str) -> tuple[overrides_lib.Override, ...]:
    return Choice(mesh=mesh, reason="").overrides(overrides)

  def compiled(mesh: str) -> result.Plan | result.Failure:
    try:
      return child.plan(
        experiment,
        with_mesh(mesh),
        target,
        is_compiled=True,
        time_limit=_SECONDS,
      )
    except (user_error.UserError, RuntimeError) as error:
      return result.Failure(target=target.text, message=str(error))

  with tracer.Tracer(
    experiment, with_mesh(fitting[0]), target, time_limit=_SECONDS
  ) as traces:
    found = first_that_fits(
      fitting,
      forecast=lambda mesh: traces.plan([overrides_lib.Override(_PATH, mesh)]),
      compiled=None if topology.missing(target) else compiled,
      usable=usable,
    )
  if isinstance(found, Choice):
    return found
  raise _nothing_fits(target, _meshes(fitting), found, figures, usable)


def first_that_fits(
  ranked: Sequence[str],
  *,
  forecast: Planner,
  compiled: Planner | None,
  usable: float,
) -> Choice | int:
  """Returns the first mesh that fits, or the least that any needs.

  Args:
    ranked: Meshes, the fastest first.
    forecast: Plans without a compiler.
    compiled: Plans with one; None where there is none.
    usable: Bytes of a device.

  Raises:
    UserError: No mesh could be planned at all.
  """
  least: int | None = None
  failure = ""
  num_compiles = 0
  # What the compiler needs beside what the forecast of the same mesh says.
  factor = 1.0
  for place, mesh in enumerate(ranked[:_MAX_TRACES], start=1):
    plan = forecast(mesh)
    if isinstance(plan, result.Failure) or plan.memory.forecast is None:
      failure = plan.message if isinstance(plan, result.Failure) else failure
      continue
    peak, by = round(factor * plan.memory.forecast), "forecast"
    if peak <= usable and compiled is not None and num_compiles < _MAX_COMPILES:
      num_compiles += 1
      checked = compiled(mesh)
      if isinstance(checked, result.Failure):
        failure = checked.message
        continue
      by = "compiled"
      if checked.memory.fit is result.Fit.DOES_NOT_FIT:
        peak = checked.memory.peak or round(usable) + 1
      elif checked.memory.peak is not None:
        peak = checked.memory.peak
      factor = max(factor, peak / plan.memory.forecast)
    least = peak if least is None else min(least, peak)
    if peak <= usable:
      return Choice(mesh=mesh, reason=_reason(place, ranked, peak, usable, by))
  if least is None:
    raise user_error.UserError(f"mesh=auto: no mesh can be planned: {failure}")
  return least


def _reason(
  place: int, ranked: Sequence[str], peak: int, usable: float, by: str
) -> str:
  faster = f"; the {place - 1} that send less do not" if place > 1 else ""
  return (
    f"which sends least of {_meshes(ranked)} and fits:"
    f" {units.size(peak)} of {units.size(usable)} a device ({by})"
    f"{faster}"
  )


def _ranked(
  job: job_lib.Job, figures: mesh_figures.MeshFigures, target: targets.Target
) -> list[str]:
  """All meshes that divide the job's work, those that send least first."""
  parts = job.task.learner.num_microbatches
  given = [
    str(spec)
    for spec in meshes.factorizations(
      mesh_lib.MeshSpec.parse("data=-1"),
      num_devices=target.num_devices,
      num_slices=target.slices,
    )
  ]
  found = [
    mesh
    for mesh in given
    if figures.is_possible(mesh, num_microbatches=parts)
    and figures.shares_work(mesh)
  ]
  if not found:
    rows = job.train_input.global_batch_size
    raise user_error.UserError(
      f"mesh=auto: none of {_meshes(given)} of {target} divides the job; give"
      f" a mesh to see what does not, and a global_batch_size ({rows}) that is"
      f" a multiple of {target.num_devices}."
    )

  def seconds(mesh: str) -> tuple[float, str]:
    # The size of an element changes no order: all figures grow alike.
    sent = figures.traffic(mesh, itemsize=2, num_microbatches=parts)
    return _time(sent, target), mesh

  return sorted(found, key=seconds)


def _time(sent: communication.Traffic, target: targets.Target) -> float:
  """Seconds, or bytes where the rates are not known."""
  kind = target.hardware
  if kind.peak_flops() is None or kind.link_bandwidth is None:
    return sent.total
  return cost.of({}, sent, kind=kind, num_devices=target.num_devices).total


def _meshes(ranked: Sequence[str]) -> str:
  return f"{len(ranked)} mesh{'es' if len(ranked) > 1 else ''}"


def _nothing_fits(
  target: targets.Target,
  meshes_in_words: str,
  least: int,
  figures: mesh_figures.MeshFigures,
  usable: float,
) -> user_error.UserError:
  words = "make the batch, length or model smaller, or recompute more"
  if figures.whole_state() > usable * target.num_devices:
    words = advice.devices_for(
      figures.whole_state(), usable=usable, num_devices=target.num_devices
    )
  return user_error.UserError(
    f"mesh=auto: none of {meshes_in_words} of {target} fits: the smallest"
    f" needs {units.size(least)} of {units.size(usable)} a device;"
    f" {words.rstrip('.')}."
  )
