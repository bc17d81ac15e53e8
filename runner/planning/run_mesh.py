"""`mesh="auto"`: the mesh of a job, chosen for its devices.

The search of `--plan_search` with the mesh alone and a smaller budget: the most
promising meshes are compiled, and the fastest that fits is taken. Without the
devices' compiler the first mesh by analytical estimate whose state fits is
taken.

A run chooses for the devices that it finds, and its first process chooses for
all hosts. Once it has a checkpoint the mesh is kept, as long as it fits the
devices. The choice is among the run's settings, so its evaluation and decoding
use it like one that was typed.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
import contextlib
import dataclasses
import itertools
import math
from typing import Any, Final

from etils import epath
import jax

from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner import units, user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.configuration import resolving
from paxon.runner.hosts import agreement
from paxon.runner.plan import advice, hardware, topology
from paxon.runner.plan import target as targets
from paxon.runner.planning import attempts, job_lint, mesh_factors
from paxon.runner.planning import search as search_lib
from paxon.runner.planning import subject as subject_lib
from paxon.runner.session import run_files
from paxon.sharding import axes
from paxon.sharding import mesh as mesh_lib

# Kinds of TPU whose slices are written with two dimensions.
_FLAT: Final = ("v5e", "v6e")
_COMPILES: Final = 4
# Axes that split only the batch and, for fsdp, how parameters are stored.
_SHRINKING: Final = (axes.DATA, axes.FSDP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """A mesh, and why.

  Attributes:
    mesh: As it is typed.
    reason: For a reader.
    asked: The mesh that was asked for.
  """

  mesh: str
  reason: str
  asked: str = mesh_lib.AUTO

  @property
  def line(self) -> str:
    """The line to print."""
    return f"mesh={self.asked}: {self.mesh or 'one device'}, {self.reason}"

  def overrides(
    self, given: Sequence[overrides_lib.Override]
  ) -> tuple[overrides_lib.Override, ...]:
    """Returns the overrides with this mesh in place of any other."""
    others = (override for override in given if override.path != "mesh")
    return (*others, overrides_lib.Override("mesh", self.mesh))


def choose(
  job: job_lib.Job,
  *,
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  target: targets.Target,
  is_compiled: bool = True,
) -> Choice:
  """Chooses a mesh for a target.

  Args:
    job: The resolved configuration; its mesh is ignored.
    experiment: As `--exp` takes it.
    overrides: Overrides of the command line.
    target: The devices, which may be absent.
    is_compiled: Whether to compile the most promising meshes, if the compiler
      is installed.

  Raises:
    UserError: The batch or the variables divide by no mesh, or nothing fits.
  """
  subject = subject_lib.Subject(
    experiment=experiment,
    overrides=overrides,
    config=resolving.resolve(experiment, overrides).config,
    job=dataclasses.replace(job, mesh=mesh_lib.AUTO),
    shapes=job_lint.get_shapes(job),
    target=target,
    is_compiled=is_compiled
    and search_lib.problem(target) is None
    and not topology.missing(target),
  )
  return _choose(attempts.Search(subject, None, only_meshes=True))


def _choose(search: attempts.Search) -> Choice:
  subject = search.subject
  ordered = search.order(search.candidates)
  number = len(ordered)
  if not ordered:
    raise _no_mesh(search)
  if not subject.is_compiled:
    reason = f"the first of {_meshes(number)} by analytical estimate"
    if search_lib.problem(subject.target) is None:
      state = search.expect(ordered[0]).state
      reason += (
        f"; its state takes {units.size(state)} of"
        f" {units.size(search.usable)} a device, and nothing was compiled"
      )
    return Choice(mesh=ordered[0].layout.mesh, reason=reason)
  search_lib.compile_rounds(search, _COMPILES)
  best = search.rank()
  compiled = len(search.attempts)
  if best:
    plan = best[0].plan
    assert plan is not None
    return Choice(
      mesh=best[0].candidate.layout.mesh,
      reason=(
        f"the best of {compiled} compiled of {_meshes(number)}:"
        f" {units.seconds(attempts.get_step_time(plan) or 0.0)} a step,"
        f" {units.size(attempts.get_peak(plan) or 0)} of"
        f" {units.size(search.usable)} a device"
      ),
    )
  failures = [a.failure for a in search.attempts if a.failure]
  if len(failures) == compiled:
    raise user_error.UserError(
      f"mesh=auto: no mesh can be planned: {failures[0]}"
    )
  least = min(
    attempts.get_peak(a.plan) or math.inf for a in search.attempts if a.plan
  )
  needs = f": the smallest needs {units.size(least)}" * (least < math.inf)
  raise user_error.UserError(
    f"mesh=auto: none of the {_meshes(compiled)} that were compiled for"
    f" {subject.target}, of {number}, fits{needs} of"
    f" {units.size(search.usable)} a device; make the batch, length or model"
    " smaller, or recompute more; --mode=plan proposes a change."
  )


def choose_for_run(
  job: job_lib.Job,
  *,
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  run_dir: epath.Path,
) -> Choice:
  """Returns the mesh of a run.

  Args:
    job: The resolved configuration, whose mesh is `auto`.
    experiment: As `--exp` takes it.
    overrides: Assignments of the command line.
    run_dir: The run's folder, which exists.

  Raises:
    UserError: As for `choose`.
  """

  def choose_mesh() -> dict[str, str]:
    devices = jax.devices()
    stored = _find_stored_mesh(job, run_dir, len(devices))
    if stored is not None:
      return {"mesh": stored, "reason": "which this run has had"}
    choice = choose(
      job,
      experiment=experiment,
      overrides=overrides,
      target=make_target(devices),
    )
    return dataclasses.asdict(choice)

  # One process alone looks into the folder, and starts compilers.
  return Choice(**agreement.from_first(choose_mesh))


def fit(
  mesh: str, *, devices: Sequence[jax.Device] | None = None
) -> Choice | None:
  """Returns a smaller mesh for fewer devices than a mesh was written for.

  Only axes that split the batch become smaller: the global batch stays, and so
  do its sequences; each device has more of them.

  Args:
    mesh: As it is typed.
    devices: Available devices, by default all.

  Returns:
    The mesh; None if the given one fits.

  Raises:
    UserError: The other axes need more devices, or another number.
  """
  count = len(jax.devices() if devices is None else devices)
  spec = mesh_lib.MeshSpec.parse(mesh)
  try:
    spec.resolve(count)
    return None
  except ValueError as error:
    problem = error
  sizes = {"dcn": dict(spec.dcn), "ici": dict(spec.ici)}
  total = math.prod(size for net in sizes.values() for size in net.values())
  for net, axis in itertools.product(("dcn", "ici"), _SHRINKING):
    size = sizes[net].get(axis, 1)
    total //= size
    if total > 0 and count % total == 0 and count // total < size:
      sizes[net][axis] = count // total
      return Choice(
        mesh=str(mesh_lib.MeshSpec(ici=sizes["ici"], dcn=sizes["dcn"])),
        reason=f"for the {count} devices that are left",
        asked=mesh,
      )
    if axis in sizes[net]:
      sizes[net][axis] = 1
  raise user_error.UserError(str(problem)) from problem


def make_target(devices: Sequence[Any]) -> targets.Target:
  """Returns devices as a target that a plan can be made for.

  Of a kind that the table of hardware lacks, and of a number that no target
  has, CPU devices stand in: then neither memory nor rates are known.

  Args:
    devices: All of the job.
  """
  stand_in = f"cpu:{len(devices)}"
  kind = hardware.find_by_device_kind(devices[0].device_kind)
  if kind is None:
    return targets.parse(stand_in)
  texts: Iterable[str] = ()
  if kind.platform.has_hosts:
    texts = _hosts(kind, devices)
  elif kind.platform is hardware.Platform.TPU:
    texts = (_slices(kind, devices),)
  for text in texts:
    with contextlib.suppress(ValueError):
      target = targets.parse(text)
      if target.num_devices == len(devices):
        return target
  return targets.parse(stand_in)


def _hosts(kind: hardware.Hardware, devices: Sequence[Any]) -> Iterator[str]:
  """GPU targets, the likelier first.

  A process has a host's GPUs, or one of them; then JAX tells hosts by slices.
  """
  for attribute in ("process_index", "slice_index"):
    counts = collections.Counter(
      getattr(device, attribute, 0) for device in devices
    )
    if len(set(counts.values())) == 1:
      yield f"{kind.name}:{len(counts)}x{next(iter(counts.values()))}"


def _slices(kind: hardware.Hardware, devices: Sequence[Any]) -> str:
  """A TPU target, by the coordinates of its chips."""
  slices = {mesh_lib.find_slice(device) for device in devices}
  coordinates = [tuple(device.coords) for device in devices]
  sides = [max(c) - min(c) + 1 for c in zip(*coordinates, strict=True)]
  shape = sides[:2] if kind.name in _FLAT else sides
  size = "x".join(map(str, sorted(shape)))
  if math.prod(sides) * len(slices) * kind.devices_per_chip != len(devices):
    return f"{kind.name}:?"
  if len(slices) > 1:
    size = f"{len(slices)}x({size})"
  return f"{kind.name}:{size}"


def _find_stored_mesh(
  job: job_lib.Job, run_dir: epath.Path, num_devices: int
) -> str | None:
  """The mesh of the checkpoints in the folder, if it fits the devices."""
  settings = run_files.read_settings(run_dir)
  # A run that has saved nothing may be one of another size by now.
  if (
    settings is None
    or settings.experiment != job.experiment
    or not _has_checkpoint(run_dir)
  ):
    return None
  given = [each.text for each in settings.overrides if each.path == "mesh"]
  if not given or given[-1] == mesh_lib.AUTO:
    return None
  try:
    mesh_lib.MeshSpec.parse(given[-1]).resolve(num_devices)
  except ValueError:
    return None
  return given[-1]


def _has_checkpoint(run_dir: epath.Path) -> bool:
  """Whether there is one; by names, because one process alone looks."""
  folder = run_dir / run_dirs.CHECKPOINTS
  return folder.is_dir() and any(p.name.isdigit() for p in folder.iterdir())


def _meshes(number: int) -> str:
  return f"{number} mesh{'es' if number > 1 else ''}"


def _no_mesh(search: attempts.Search) -> user_error.UserError:
  """Why there is no candidate: sizes do not divide, or the state is large."""
  subject, estimates = search.subject, search.space.layouts
  divide = [
    str(spec)
    for spec in mesh_factors.meshes(
      mesh_lib.MeshSpec.parse("data=-1"),
      target=subject.target,
      varied=estimates.usable_axes,
    )
    if estimates.is_possible(
      str(spec), microbatches=subject.job.task.learner.num_microbatches
    )
  ]
  if not divide:
    batch = subject.job.train_input.global_batch_size
    return user_error.UserError(
      f"mesh=auto: no mesh of {subject.target} divides the job; give a mesh to"
      f" see what does not divide, and a global_batch_size ({batch}) that is a"
      f" multiple of {subject.target.num_devices}."
    )
  words = "use a larger --target"
  whole = estimates.whole_state_bytes()
  if whole > search.usable * subject.target.num_devices:
    words = advice.devices_for(
      whole,
      usable=search.usable,
      num_devices=subject.target.num_devices,
    ).rstrip(".")
  least = min(map(estimates.state_bytes, divide))
  return user_error.UserError(
    f"mesh=auto: the state fits in none of {_meshes(len(divide))} of"
    f" {subject.target}: it takes at least {units.size(least)} of"
    f" {units.size(search.usable)} a device; {words}."
  )
