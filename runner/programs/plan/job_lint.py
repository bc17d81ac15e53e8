"""The sharding lint of a job, before any backend of JAX is touched."""

import math

import jax

from paxon.inputs import base_input
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.programs import model_loss
from paxon.sharding import axes, lint, variables
from paxon.sharding import mesh as meshes


def check(
  job: job_lib.Job, *, num_devices: int, num_slices: int = 1
) -> list[lint.Finding]:
  """Checks the layout of a job's variables and batches.

  Args:
    job: The resolved configuration.
    num_devices: Number of devices of its mesh.
    num_slices: Number of TPU slices that they are in.

  Returns:
    What `lint.check` found.

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
  shapes = _shapes(job.train_input)
  batch = {
    name: jax.ShapeDtypeStruct(shape, dtype)
    for name, (shape, dtype) in shapes.items()
  }
  specs = variables.specs_of(
    model_loss.abstract_variables(job.task.model, batch)
  )
  return lint.check(
    specs,
    batch={name: shape for name, (shape, _) in shapes.items()},
    mesh={axis: full.ici[axis] * full.dcn[axis] for axis in axes.MESH_AXES},
    rules=job.rules,
  )


def _shapes(source: base_input.BaseInput) -> base_input.Shapes:
  """Shapes of a global batch: one host reads all of it."""
  source.set_infeed_hosts(infeed_host_index=0, num_infeed_hosts=1)
  position = source.get_state()
  shapes = source.batch_shapes()
  if shapes is not None:
    return shapes
  try:
    batch = source.get_next()
  except StopIteration:
    raise user_error.UserError(
      "The training input has no batch; it needs more data, or a smaller"
      " global_batch_size."
    ) from None
  source.set_state(position)
  return {name: (value.shape, value.dtype) for name, value in batch.items()}
