"""The sharding lint of a job, before any backend of JAX is touched."""

import dataclasses
import math

import jax

from paxon.inputs import base_input
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.session import batch_padding, model_loss, session
from paxon.sharding import axes, lint, rules, variables
from paxon.sharding import mesh as meshes


@dataclasses.dataclass(frozen=True)
class JobShapes:
  """Shapes of a job's variables and of a global batch.

  Attributes:
    specs: Of each variable.
    batch: Shape and dtype of each array.
  """

  specs: variables.Specs
  batch: base_input.Shapes

  def to_text(self) -> str:
    """Returns one line a variable or array: name, shape, dtype and axes."""
    lines = [
      f"{spec.name} {spec.shape} {spec.dtype} {spec.axes}"
      for spec in jax.tree.leaves(
        self.specs, is_leaf=lambda x: isinstance(x, variables.VariableSpec)
      )
    ]
    lines += [
      f"batch/{name} {shape} {dtype}"
      for name, (shape, dtype) in sorted(self.batch.items())
    ]
    return "\n".join(lines)


def get_shapes(job: job_lib.Job) -> JobShapes:
  """Returns the shapes of a job, for which nothing is computed.

  Raises:
    UserError: The training input has no batch.
  """
  # One host reads all of a global batch.
  job.train_input.set_infeed_hosts(infeed_host_index=0, num_infeed_hosts=1)
  shapes = session.batch_shapes(job.train_input)
  batch = {
    name: jax.ShapeDtypeStruct(shape, dtype)
    for name, (shape, dtype) in shapes.items()
  }
  abstract = model_loss.abstract_variables(job.task.model, batch)
  return JobShapes(variables.get_specs(abstract), shapes)


def check(
  job: job_lib.Job,
  *,
  num_devices: int,
  num_slices: int = 1,
  shapes: JobShapes | None = None,
) -> list[lint.Finding]:
  """Checks the layout of a job's variables and batches.

  Args:
    job: The resolved configuration.
    num_devices: Number of devices of its mesh.
    num_slices: Number of TPU slices that they are in.
    shapes: Result of `get_shapes`; by default it is called here.

  Returns:
    The findings of `lint.check`.

  Raises:
    UserError: The mesh cannot cover so many devices, or so many slices.
  """
  try:
    full = meshes.MeshSpec.parse(job.mesh).resolve(num_devices)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  between = math.prod(full.dcn.values())
  if num_slices > 1 and between != num_slices:
    raise user_error.UserError(
      f"mesh {job.mesh!r} has {between} parts over the slow network, but there"
      f" are {num_slices} slices; write for example"
      f" 'fsdp={num_devices // num_slices},dcn.data={num_slices}'."
    )
  shapes = shapes or get_shapes(job)
  mesh = {axis: full.ici[axis] * full.dcn[axis] for axis in axes.MESH_AXES}
  batch, findings = shapes.batch, []
  (entry,) = rules.to_partition_spec((axes.BATCH,), rules=job.rules)
  shards = math.prod(mesh.get(name, 1) for name in rules.as_tuple(entry))
  size = job.train_input.global_batch_size
  if size % shards and not (
    batch_padding.find_obstacle(batch)
    or batch_padding.find_training_obstacle(job, shapes.specs, batch)
  ):
    batch = batch_padding.pad_shapes(batch, shards)
    findings = batch_padding.find_padding(size, shards)
  found = lint.check(
    shapes.specs,
    batch={name: shape for name, (shape, _) in batch.items()},
    mesh=mesh,
    rules=job.rules,
    partitioner=job.partitioner,
  )
  return [*found, *findings]
