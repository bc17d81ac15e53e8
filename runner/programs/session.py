"""What all programs of a job share: its devices, variables and shardings."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs import base_input
from paxon.learners import train_state, variable_groups
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.programs import model_loss
from paxon.sharding import arrays, axes, initialization, variables
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
  """A job on its devices. Nothing in it is an array yet.

  Attributes:
    job: The resolved configuration.
    layout: Mesh and rules.
    specs: A `VariableSpec` for each variable of the model.
    state_specs: A train state of specs.
    state_shardings: A train state of shardings.
    batch: Shapes, dtypes and shardings of a global training batch.
  """

  job: job_lib.Job
  layout: layouts.Layout
  specs: variable_groups.Specs
  state_specs: train_state.TrainState
  state_shardings: train_state.TrainState
  batch: Mapping[str, jax.ShapeDtypeStruct]

  def initial_state(self) -> train_state.TrainState:
    """Computes the state before the first step, each shard where it belongs."""
    task = self.job.task

    def fallback() -> Any:
      batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.batch)
      return variables.unbox(model_loss.init(task.model, batch))

    def compute() -> train_state.TrainState:
      values = initialization.initial_values(
        self.specs, self.job.seed, fallback=fallback
      )
      return train_state.initial(values, learner=task.learner, specs=self.specs)

    return self.layout.jit(compute, out_shardings=self.state_shardings)()

  def evaluation_variables(
    self, state: train_state.TrainState
  ) -> variable_groups.Tree:
    """Returns what to evaluate and generate with; see `train_state`."""
    return train_state.evaluation_variables(
      state, learner=self.job.task.learner, specs=self.specs
    )

  def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns the global arrays of one host's rows of a batch."""
    return arrays.to_global(batch, self.layout)


def open_session(
  job: job_lib.Job, *, devices: Sequence[jax.Device] | None = None
) -> Session:
  """Finds out what a job needs, without computing anything.

  Args:
    job: The resolved configuration. Its inputs are told which host this is.
    devices: Those of the mesh; by default all.

  Raises:
    UserError: The mesh does not fit the devices, or a batch or a variable does
      not divide by the mesh.
  """
  try:
    mesh = meshes.make_mesh(meshes.MeshSpec.parse(job.mesh), devices=devices)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  layout = layouts.Layout(mesh, job.rules)
  for name, source in (("train", job.train_input), *job.eval_inputs.items()):
    _check_batch(source, name=name, layout=layout, mesh=job.mesh)
    source.set_infeed_hosts(
      infeed_host_index=jax.process_index(),
      num_infeed_hosts=jax.process_count(),
    )
  batch = _abstract_batch(job.train_input, layout)
  specs = variables.specs_of(
    model_loss.abstract_variables(job.task.model, batch)
  )
  state_specs = train_state.state_specs(specs, learner=job.task.learner)
  try:
    shardings = layout.shardings({"state": state_specs})["state"]
  except ValueError as error:
    raise user_error.UserError(f"mesh {job.mesh!r}: {error}") from error
  return Session(
    job=job,
    layout=layout,
    specs=specs,
    state_specs=state_specs,
    state_shardings=shardings,
    batch=batch,
  )


def for_evaluation(tree: train_state.TrainState) -> train_state.TrainState:
  """Returns a state without what only updates need.

  Args:
    tree: A train state of arrays, specs or shardings.
  """
  return dataclasses.replace(tree, opt_state=(), skipped=None)


def _check_batch(
  source: base_input.BaseInput, *, name: str, layout: layouts.Layout, mesh: str
) -> None:
  shards = layout.shards(axes.BATCH)
  if source.global_batch_size % shards:
    raise user_error.UserError(
      f"global_batch_size ({source.global_batch_size}) of the split {name!r}"
      f" must be a multiple of {shards}, the number of parts into which mesh"
      f" {mesh!r} splits a batch over {layout.mesh.size} devices."
    )


def _abstract_batch(
  source: base_input.BaseInput, layout: layouts.Layout
) -> dict[str, jax.ShapeDtypeStruct]:
  """Reads one batch for its shapes and goes back."""
  position = source.get_state()
  try:
    batch = source.get_next()
  except StopIteration:
    raise user_error.UserError(
      "The training input has no batch; it needs more data, or a smaller"
      " global_batch_size."
    ) from None
  source.set_state(position)
  return {
    name: jax.ShapeDtypeStruct(
      (value.shape[0] * source.num_infeed_hosts, *value.shape[1:]),
      value.dtype,
      sharding=layout.batch_sharding(value.ndim),
    )
    for name, value in batch.items()
  }
