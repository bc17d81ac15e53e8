"""Memory and communication of a mesh, by arithmetic on shapes."""

from collections.abc import Collection
import math

import jax

from paxon.learners import train_state
from paxon.runner import job as job_lib
from paxon.runner.plan import target as targets
from paxon.runner.plan.search import communication, meshes
from paxon.runner.planning import job_lint
from paxon.sharding import axes, variables
from paxon.sharding import mesh as mesh_lib


class MeshFigures:
  """Figures of one job on one target, for meshes as they are typed."""

  def __init__(
    self,
    job: job_lib.Job,
    shapes: job_lint.JobShapes,
    target: targets.Target,
  ) -> None:
    self._job = job
    self._shapes = shapes
    self._target = target
    self._specs: list[variables.VariableSpec] = jax.tree.leaves(shapes.specs)
    self._state = jax.tree.leaves(
      train_state.state_specs(shapes.specs, learner=job.task.learner)
    )
    self._batch = {name: shape for name, (shape, _) in shapes.batch.items()}
    self._rows = max(self._batch.values(), key=len)[:2]

  def traffic(
    self,
    mesh: str,
    *,
    itemsize: int,
    num_microbatches: int,
    narrow: Collection[str] = (),
  ) -> communication.Traffic:
    """Returns what a mesh makes devices send.

    Args:
      mesh: As it is typed.
      itemsize: Bytes of an element as it is computed with.
      num_microbatches: Parts of a batch.
      narrow: Paths of variables that are gathered quantized.
    """
    return communication.traffic(
      self._specs,
      self._layout(mesh),
      batch_shape=self._rows,
      itemsize=itemsize,
      num_microbatches=num_microbatches,
      narrow=narrow,
    )

  def is_possible(self, mesh: str, *, num_microbatches: int) -> bool:
    """Whether sizes divide."""
    layout = self._layout(mesh)
    sizes = {axis: layout.size(axis) for axis in axes.MESH_AXES}
    shards = meshes.batch_shards(sizes, layout.rules)
    if self._rows[0] % (shards * num_microbatches):
      return False
    return meshes.is_sound(
      sizes, specs=self._shapes.specs, batch=self._batch, rules=layout.rules
    )

  def shares_work(self, mesh: str) -> bool:
    """Whether no axis of a mesh has its devices all do the same work."""
    layout = self._layout(mesh)
    sizes = {axis: layout.size(axis) for axis in axes.MESH_AXES}
    return meshes.shares_work(sizes, rules=layout.rules)

  def state(self, mesh: str) -> int:
    """Returns the bytes of the state on a device."""
    layout = self._layout(mesh)
    return sum(
      math.prod(spec.shape) * spec.dtype.itemsize // layout.parts(spec.axes)
      for spec in self._state
    )

  def whole_state(self) -> int:
    """Returns the bytes of the state, not split."""
    return sum(
      math.prod(spec.shape) * spec.dtype.itemsize for spec in self._state
    )

  def _layout(self, mesh: str) -> communication.Layout:
    full = mesh_lib.MeshSpec.parse(mesh).resolve(self._target.num_devices)
    return communication.Layout(
      mesh=full, kind=self._target.hardware, rules=self._job.rules
    )
