"""A job on its devices: layout, variables and shardings."""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs import base_input
from paxon.learners import train_state, variable_groups
from paxon.quantization import recipes, stored_kernels
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.plan import compiler_options
from paxon.runner.session import (
  batch_padding,
  kernel_checks,
  memory_fit,
  model_loss,
  serving,
)
from paxon.sharding import (
  arrays,
  axes,
  host_memory,
  initialization,
  lint,
  logical,
  variables,
)
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes
from paxon.sharding import rules as sharding_rules

# Ends of the keys of token ids in batches.
_IDS = ("inputs", "targets")
# Ids before a wrong one that an error shows.
_NUM_BEFORE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
  """A job on its devices; holds no arrays.

  Attributes:
    job: The resolved configuration.
    layout: Mesh and rules.
    specs: A `VariableSpec` for each variable of the model.
    state_specs: A train state of specs.
    state_shardings: A train state of shardings.
    batch: Shapes, dtypes and shardings of a global training batch, the largest
      with `Job.batch_ramp`.
    batch_size: Its sequences.
    absent: Parameters of the model that are not in the state, by name, because
      quantized weights or stored kernels replace them (`serving`).
    generating: The programs that generate, by layout, so that each is traced
      and compiled once.
  """

  job: job_lib.Job
  layout: layouts.Layout
  specs: variable_groups.Specs
  state_specs: train_state.TrainState
  state_shardings: train_state.TrainState
  batch: Mapping[str, jax.ShapeDtypeStruct]
  batch_size: int
  absent: serving.Absent = dataclasses.field(default_factory=dict)
  generating: dict[layouts.Layout, layouts.LaidOut] = dataclasses.field(
    default_factory=dict, init=False, repr=False, compare=False
  )

  @property
  def compiler_options(self) -> dict[str, bool | str]:
    """The compiler options of its steps, here or in a plan."""
    return compiler_options.resolve_options(
      self.job.compiler_options,
      _one_device(self.layout.mesh),
      num_devices=self.layout.mesh.size,
      sets=self.job.compiler_option_sets,
    )

  def num_parameters(self) -> int:
    """Returns the number of trained parameters on all devices."""
    return sum(
      math.prod(spec.shape)
      for spec in jax.tree.leaves(self.specs)
      if variable_groups.find_group(spec) is variable_groups.Group.OPTIMIZED
    )

  def abstract_state(self) -> train_state.TrainState:
    """Returns a placed `jax.ShapeDtypeStruct` for each array of the state."""
    return variables.abstract(self.state_specs, self.state_shardings)

  def initial_state(
    self, given: Mapping[str, jax.Array] | None = None
  ) -> train_state.TrainState:
    """Computes the state before the first step, sharded.

    Args:
      given: Values by logical name that replace the computed ones, with the
        state's shapes, dtypes and shardings. They are donated. The optimizer's
        state is made from the replaced variables.
    """
    task = self.job.task

    def fallback() -> Any:
      batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.batch)
      return variables.unbox(model_loss.init(task.model, batch))

    def compute(given: Mapping[str, jax.Array]) -> train_state.TrainState:
      given = {**self._quantized_initial(given), **given}

      def replace_given(specs: Any, values: Any) -> Any:
        return jax.tree.map(
          lambda spec, value: given.get(spec.name, value), specs, values
        )

      values = initialization.initial_values(
        self.specs, self.job.seed, fallback=fallback
      )
      state = train_state.make_initial(
        replace_given(self.specs, values),
        learner=task.learner,
        specs=self.specs,
      )
      return replace_given(self.state_specs, state)

    start = self.layout.jit(
      compute,
      out_shardings=self.state_shardings,
      donate_argnums=0,
      compiler_options=self.compiler_options,
    )
    return start(dict(given or {}))

  def with_batch_size(self, size: int) -> "Session":
    """Returns the session with another global batch size of training."""
    shards = self.layout.shards(axes.BATCH)
    before, after = (
      sharding_rules.round_up(each, shards) for each in (self.batch_size, size)
    )
    batch = {
      name: x.update(shape=(x.shape[0] * after // before, *x.shape[1:]))
      for name, x in self.batch.items()
    }
    return dataclasses.replace(self, batch=batch, batch_size=size)

  def find_stored(self, parameter: str) -> list[variables.VariableSpec]:
    """Returns the variables that store an absent parameter."""
    return [
      spec
      for spec in jax.tree.leaves(self.specs)
      if stored_kernels.find_parameter(spec.name) == parameter
    ]

  def quantize(self, parameter: str, value: jax.Array) -> dict[str, jax.Array]:
    """Returns the quantized arrays that replace a parameter."""
    count = len(self.absent[parameter].stacked)
    found: dict[str, jax.Array] = {}
    fields: stored_kernels.Fields = {}
    for spec in self.find_stored(parameter):
      origin = spec.initializer
      assert isinstance(origin, stored_kernels.Origin)
      fields = fields or origin.quantize(value, num_stacked=count)
      found[spec.name] = fields[origin.field]
    return found

  def dequantize(
    self, parameter: str, values: Mapping[str, jax.Array]
  ) -> jax.Array:
    """Returns an absent parameter from its stored arrays, by name."""
    absent = self.absent[parameter]
    specs = self.find_stored(parameter)
    origin = specs[0].initializer
    assert isinstance(origin, stored_kernels.Origin)
    fields = {
      spec.initializer.field: values[spec.name]
      for spec in specs
      if isinstance(spec.initializer, stored_kernels.Origin)
    }
    return origin.dequantize(
      fields, shape=absent.layer_shape, num_stacked=len(absent.stacked)
    )

  def _quantized_initial(
    self, given: Mapping[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Returns the initial stored kernels that are not given."""
    names = [
      name
      for name in self.absent
      if any(spec.name not in given for spec in self.find_stored(name))
    ]
    specs = {name: self.absent[name] for name in names}
    found: dict[str, jax.Array] = {}
    for name, value in initialization.initial_values(
      specs, self.job.seed
    ).items():
      found |= self.quantize(name, value)
    return found

  def evaluation_variables(
    self, state: train_state.TrainState
  ) -> variable_groups.Tree:
    """Returns the variables for evaluation and generation (`train_state`)."""
    values = train_state.evaluation_variables(
      state, learner=self.job.task.learner, specs=self.specs
    )
    values = logical.constrain_variables(values, self.specs)
    return serving.complete(values, self.absent)

  @functools.cached_property
  def vocab_size(self) -> int | None:
    """The largest vocabulary of the model; None without one."""
    sizes = [
      size
      for spec in jax.tree.leaves(self.specs)
      for size, axis in zip(spec.shape, spec.axes, strict=True)
      if axis == axes.VOCAB
    ]
    return max(sizes, default=None)

  def check_ids(self, batch: Mapping[str, np.ndarray]) -> None:
    """Raises UserError if a token of a batch is not in the vocabulary.

    It would be embedded as NaN.
    """
    size = self.vocab_size
    for name, array in batch.items():
      is_text = (
        name.endswith(_IDS) and array.ndim == 2 and array.dtype.kind in "iu"
      )
      if size is None or not is_text or not array.size or array.max() < size:
        continue
      row, column = np.argwhere(array >= size)[0]
      number = int(array[row, column])
      before = array[row, max(0, column - _NUM_BEFORE) : column].tolist()
      raise user_error.UserError(
        f"A batch has the token id {number} ({name}, after the ids {before}),"
        f" but the model's vocab_size is {size}; leave that token out, or use"
        " the tokenizer that the model was trained with."
      )

  def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns global arrays from this host's sequences of a batch.

    A size that the mesh does not divide is padded (`batch_padding`).

    Raises:
      UserError: See `check_ids`.
    """
    self.check_ids(batch)
    num_hosts = self.job.train_input.num_infeed_hosts
    if num_hosts == 1:
      batch = batch_padding.pad(batch, self.layout.shards(axes.BATCH))
    return arrays.to_global(batch, self.layout, num_hosts=num_hosts)


def open_session(
  job: job_lib.Job,
  *,
  devices: Sequence[jax.Device] | None = None,
  splits: Collection[str] | None = None,
) -> Session:
  """Lays a job out on devices, by default all; sets the infeed of its inputs.

  Computes nothing.

  Args:
    job: The job.
    devices: The devices.
    splits: Splits whose data is opened, so that a missing file is found here;
      None for all. Another one is opened only if its shapes are not known.

  Raises:
    UserError: The mesh does not fit the devices, a batch or a variable is not
      divisible by the mesh, or the compiler does not have an option.
  """
  try:
    mesh = meshes.make_mesh(meshes.MeshSpec.parse(job.mesh), devices=devices)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  if job.task.learner.offload_state:
    try:
      host_memory.check(mesh.devices.flat)
    except ValueError as error:
      raise user_error.UserError(
        f"Learner.offload_state must be False here: {error}."
      ) from error
  layout = layouts.Layout(mesh, job.rules, job.partitioner)
  _check_layout(job, layout, {}, {})
  _check_rules(layout)
  kernel_checks.check_attention(job, length_shards=layout.shards(axes.LENGTH))
  compiler_options.check(
    job.compiler_options, _one_device(mesh), sets=job.compiler_option_sets
  )
  _open_inputs(job, layout, splits)
  batch = abstract_batch(job.train_input, layout)
  specs, absent = _find_specs(job, layout, batch)
  _check_padding(job, layout, specs, batch)
  try:
    state_specs = train_state.state_specs(specs, learner=job.task.learner)
  except ValueError as error:
    raise user_error.UserError(f"task.learner: {error}") from error
  if serving.get_mode(job) is recipes.Mode.SERVE:
    # They are converted from the average if there is one.
    state_specs = dataclasses.replace(state_specs, average=None)
  try:
    shardings = layout.shardings(state_specs)
  except ValueError as error:
    raise user_error.UserError(f"mesh {job.mesh!r}: {error}") from error
  return Session(
    job=job,
    layout=layout,
    specs=specs,
    state_specs=state_specs,
    state_shardings=shardings,
    batch=batch,
    batch_size=job.train_input.global_batch_size,
    absent=absent,
  )


def _open_inputs(
  job: job_lib.Job, layout: layouts.Layout, splits: Collection[str] | None
) -> None:
  """Checks the inputs, sets their infeed, and opens the data of `splits`."""
  infeed_host_index, num_infeed_hosts = arrays.infeed_hosts(layout)
  shards = layout.shards(axes.BATCH)
  sizes = {each.global_batch_size for each in job.inputs.values()}
  if any(size % shards for size in sizes.union(job.batch_sizes)):
    # Padding follows the last example of all.
    infeed_host_index, num_infeed_hosts = 0, 1
  for name, source in job.inputs.items():
    _check_batch(source, name=name, layout=layout, mesh=job.mesh)
    source.set_infeed_hosts(
      infeed_host_index=infeed_host_index, num_infeed_hosts=num_infeed_hosts
    )
    memory_fit.check_batch(source)
    if splits is None or name in splits:
      source.get_state()
  _check_microbatches(job, layout)


def _find_specs(
  job: job_lib.Job,
  layout: layouts.Layout,
  batch: Mapping[str, jax.ShapeDtypeStruct],
) -> tuple[variable_groups.Specs, serving.Absent]:
  """Returns the specs of the model's variables, and its absent parameters."""
  try:
    found = model_loss.abstract_variables(job.task.model, batch)
  except TypeError as error:
    raise _stack_error(error) from error
  specs = variables.get_specs(found)
  _check_layout(job, layout, specs, batch)
  try:
    specs = variable_groups.freeze(
      specs, trainable=job.trainable, frozen=job.frozen
    )
  except ValueError as error:
    raise user_error.UserError(f"Job.{error}") from error
  specs, absent = serving.split(job, specs)
  return _narrow(specs, job.frozen_dtype), absent


def _stack_error(error: TypeError) -> Exception:
  """Returns an error in words if a scanned layer changes a dtype or shape."""
  text = user_error.one_line(error)
  if not text.startswith("scan body function carry"):
    return error
  change = text[text.find("The input carry") :].partition(", so ")[0]
  return user_error.UserError(
    "task.model: a layer of a scanned stack returns another dtype or shape than"
    f" it gets: {change}. Set the same dtype for all modules."
  )


def _narrow(
  specs: variable_groups.Specs, dtype: str | None
) -> variable_groups.Specs:
  """Returns specs with the frozen floating-point variables in a dtype."""
  if dtype is None:
    return specs

  def narrow(spec: variables.VariableSpec) -> variables.VariableSpec:
    is_frozen = (
      variable_groups.find_group(spec) is variable_groups.Group.FROZEN
      and not isinstance(spec.initializer, stored_kernels.Origin)
      and jnp.issubdtype(spec.dtype, jnp.floating)
    )
    if not is_frozen:
      return spec
    return dataclasses.replace(spec, dtype=jnp.dtype(dtype))

  return jax.tree.map(narrow, specs)


def strip_for_evaluation(
  tree: train_state.TrainState,
) -> train_state.TrainState:
  """Returns a state without the fields that only updates need."""
  return dataclasses.replace(tree, opt_state=(), skipped=None, tokens=None)


def _one_device(mesh: jax.sharding.Mesh) -> jax.Device:
  """Returns a device of the mesh, one of this process if there is one."""
  devices = list(mesh.devices.flat)
  here = jax.process_index()
  return next((d for d in devices if d.process_index == here), devices[0])


def _check_rules(layout: layouts.Layout) -> None:
  try:
    for axis in (axes.BATCH, axes.LENGTH):
      layout.shards(axis)
  except ValueError as error:
    raise user_error.UserError(f"Job.rules: {error}") from error


def _check_batch(
  source: base_input.BaseInput, *, name: str, layout: layouts.Layout, mesh: str
) -> None:
  if source.global_batch_size % layout.shards(axes.BATCH):
    obstacle = batch_padding.find_obstacle(batch_shapes(source))
    if obstacle is not None:
      size = source.global_batch_size
      raise _batch_error(size, obstacle, name=name, layout=layout, mesh=mesh)
  shards = layout.shards(axes.LENGTH)
  if source.length % shards:
    raise user_error.UserError(
      f"length ({source.length}) of the split {name!r} must be a multiple of"
      f" {shards}, the number of shards into which mesh {mesh!r} splits a"
      " sequence."
    )


def _batch_error(
  size: int,
  obstacle: str,
  *,
  name: str,
  layout: layouts.Layout,
  mesh: str,
) -> user_error.UserError:
  """Returns the error of a batch that cannot be padded."""
  return user_error.UserError(
    f"global_batch_size ({size}) of the split {name!r} must be a multiple of"
    f" {layout.shards(axes.BATCH)}, the number of shards into which mesh"
    f" {mesh!r} splits a batch over {layout.mesh.size} devices"
    f"{_describe_processes(layout)}; it cannot be padded, because {obstacle}."
  )


def _check_padding(
  job: job_lib.Job,
  layout: layouts.Layout,
  specs: variable_groups.Specs,
  names: Collection[str],
) -> None:
  """Raises UserError if padding of a batch would change a result."""
  shards = layout.shards(axes.BATCH)

  def check(size: int, obstacle: str | None, name: str) -> None:
    if obstacle is not None:
      raise _batch_error(
        size, obstacle, name=name, layout=layout, mesh=job.mesh
      )

  for size in job.batch_sizes:
    if findings := batch_padding.find_padding(size, shards):
      obstacle = batch_padding.find_training_obstacle(job, specs, names)
      if findings[0].is_error:
        obstacle = "half of it or more would be padding"
      check(size, obstacle, "train")
  for name, source in job.inputs.items():
    if (size := source.global_batch_size) % shards:
      found = batch_padding.find_expert_obstacle(
        job.task.model, specs, batch_shapes(source)
      )
      check(size, found, name)


def _describe_processes(layout: layouts.Layout) -> str:
  count = len({d.process_index for d in layout.mesh.devices.flat})
  return f" of {count} processes" if count > 1 else ""


def _check_layout(
  job: job_lib.Job,
  layout: layouts.Layout,
  specs: variable_groups.Specs,
  batch: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
  """Raises on errors of the sharding lint, as a plan does."""
  try:
    found = lint.check(
      specs,
      batch={name: value.shape for name, value in batch.items()},
      mesh=dict(layout.mesh.shape),
      rules=layout.rules,
      partitioner=layout.partitioner,
    )
  except ValueError as error:
    # A module uses a logical axis without a rule, such as a misspelled one.
    raise user_error.UserError(f"task.model: {error}") from error
  errors = [finding.message for finding in found if finding.is_error]
  if errors:
    raise user_error.UserError(f"mesh {job.mesh!r}: {'; '.join(errors)}.")


def _check_microbatches(job: job_lib.Job, layout: layouts.Layout) -> None:
  microbatches = job.task.learner.num_microbatches
  shards = layout.shards(axes.BATCH)
  for batch_size in job.batch_sizes:
    if microbatches > 1 and batch_size % (microbatches * shards):
      raise user_error.UserError(
        f"global_batch_size ({batch_size}) of the split 'train' must be a"
        f" multiple of {microbatches * shards}: num_microbatches"
        f" ({microbatches}) times the {shards} shards into which mesh"
        f" {job.mesh!r} splits each."
      )


def abstract_batch(
  source: base_input.BaseInput, layout: layouts.Layout
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the arrays of a global batch; reads one only if necessary."""
  shards, shapes = layout.shards(axes.BATCH), batch_shapes(source)
  if source.num_infeed_hosts == 1:
    shapes = batch_padding.pad_shapes(shapes, shards)
  return {
    name: jax.ShapeDtypeStruct(
      (shape[0] * source.num_infeed_hosts, *shape[1:]),
      dtype,
      sharding=layout.batch_sharding(len(shape)),
    )
    for name, (shape, dtype) in shapes.items()
  }


def batch_shapes(source: base_input.BaseInput) -> base_input.Shapes:
  """Returns the shapes of this host's batch; reads one only if necessary.

  Raises:
    user_error.UserError: There is no batch.
  """
  shapes = source.batch_shapes()
  if shapes is not None:
    return shapes
  try:
    batch = source.peek()
  except BaseException as error:
    if not base_input.is_end(error):
      raise
    raise user_error.UserError(
      "The training input has no batch; use more data or a smaller"
      " global_batch_size."
    ) from None
  # Strings never reach a device.
  return {
    name: (value.shape, value.dtype)
    for name, value in batch.items()
    if value.dtype != object
  }
