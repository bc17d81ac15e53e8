"""The mesh of a run that is configured with `auto`.

A run chooses for the devices that it finds. Once it has a checkpoint the mesh
is kept, as long as it fits the devices; where not, it is chosen anew. What was
chosen is among the run's settings, so its evaluation and decoding take it like
one that was typed; on other devices they need `mesh=auto` again, or another.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
import contextlib
import dataclasses
import math
from typing import Any, Final

from etils import epath
import jax

from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.hosts import agreement
from paxon.runner.plan import hardware
from paxon.runner.plan import target as targets
from paxon.runner.planning import auto_mesh
from paxon.runner.training import run_files
from paxon.sharding import mesh as mesh_lib

# Kinds of TPU whose slices are written with two dimensions.
_FLAT: Final = ("v5e", "v6e")


def of(
  job: job_lib.Job,
  *,
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  run_dir: epath.Path,
) -> auto_mesh.Choice:
  """Returns the mesh of a run.

  Args:
    job: The resolved configuration, whose mesh is `auto`.
    experiment: As `--exp` takes it.
    overrides: Assignments of the command line.
    run_dir: The run's folder, which exists.

  Raises:
    UserError: As for `auto_mesh.choose`.
  """

  def chosen() -> dict[str, str]:
    devices = jax.devices()
    stored = _stored(job, run_dir, len(devices))
    if stored is not None:
      return {"mesh": stored, "reason": "which this run has had"}
    choice = auto_mesh.choose(
      job,
      experiment=experiment,
      overrides=overrides,
      target=target_of(devices),
    )
    return dataclasses.asdict(choice)

  # One process alone looks into the folder, and starts compilers.
  return auto_mesh.Choice(**agreement.from_first(chosen))


def target_of(devices: Sequence[Any]) -> targets.Target:
  """Returns devices as a target that a plan can be made for.

  Of a kind that the table of hardware lacks, and of a number that no target
  has, CPU devices stand in: then neither memory nor rates are known.

  Args:
    devices: All of the job.
  """
  stand_in = f"cpu:{len(devices)}"
  kind = hardware.for_device_kind(devices[0].device_kind)
  if kind is None:
    return targets.parse(stand_in)
  texts: Iterable[str] = ()
  if kind.platform is hardware.Platform.CUDA:
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
  slices = {getattr(device, "slice_index", 0) for device in devices}
  coordinates = [tuple(device.coords) for device in devices]
  sides = [max(c) - min(c) + 1 for c in zip(*coordinates, strict=True)]
  shape = sides[:2] if kind.name in _FLAT else sides
  size = "x".join(map(str, sorted(shape)))
  if math.prod(sides) * len(slices) * kind.devices_per_chip != len(devices):
    return f"{kind.name}:?"
  if len(slices) > 1:
    size = f"{len(slices)}x({size})"
  return f"{kind.name}:{size}"


def _stored(
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
