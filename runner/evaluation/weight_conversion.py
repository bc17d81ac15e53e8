"""Conversion of trained parameters to quantized weights, with its errors."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
import operator
import os
from typing import Any

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp

from paxon.layers import contracts
from paxon.layers.decoding import model_steps
from paxon.layers.losses import auxiliary_loss
from paxon.learners import train_state
from paxon.quantization import (
  calibration,
  lora,
  number_formats,
  quantized_array,
  recipes,
  served_einsum,
)
from paxon.quantization import recipe as recipe_lib
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.configuration import rewrites
from paxon.runner.evaluation import evaluation
from paxon.runner.session import restore, run_files, serving
from paxon.runner.session import session as session_lib
from paxon.sharding import axes, variables

# Rounding errors within the range are smaller: with four bits at most 1/14 of
# the largest weight.
_MAX_ROUNDING = 0.2
_MAX_MEAN = 0.5
_MAX_PRUNED = 1.0
# Calibration batches of rules whose recipe differs from that of the knob.
_BATCHES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightErrors:
  """Quantization errors of a parameter.

  Attributes:
    largest: The largest error, relative to the largest weight.
    mean: The root mean square error, relative to that of the weights.
    rounding: As `largest`, for weights within the stored range only.
  """

  largest: float
  mean: float
  rounding: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
  """Quantized weights made from the parameters of a run.

  Attributes:
    session: The job as it was trained.
    state: Its state, without what only updates need.
    served: The job that serves the weights.
    converted: Its state.
    errors: Errors by the name of the parameter.
    left: Matmuls that the rules cover but that have no parameter of their layer
      as an operand; they are unchanged.
  """

  session: session_lib.Session
  state: train_state.TrainState
  served: session_lib.Session
  converted: train_state.TrainState
  errors: Mapping[str, WeightErrors]
  left: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
  """A run with low-rank adapters, which a conversion merges.

  Attributes:
    job: The job as it was trained.
    adapter: The adapter of all its layers.
  """

  job: job_lib.Job
  adapter: lora.Lora


def run(
  job: job_lib.Job,
  run_dir: epath.Path,
  *,
  step: int | None = None,
  trained: Trained | None = None,
) -> int:
  """Converts a checkpoint, and evaluates it before and after.

  By default the newest, otherwise that of `step`. Adapters of `trained` are
  merged first.

  Raises:
    UserError: There is no checkpoint that fits the job, it is converted
      already, or a layer uses its weights other than in a matmul.
  """
  assert job.weights is not None
  name = recipes.parse(job.weights).name
  session, state = _restore(job, run_dir, step, trained)
  step = int(state.step)
  to = serving.folder(job, run_dir)
  with checkpointer.Checkpointer(to, read_only=True) as checkpoints:
    if step in checkpoints.steps():
      raise user_error.UserError(
        f"The checkpoint of step {step} is already converted, in"
        f" {os.fspath(to)}; use it with --fdl.quantization={name}:serve, or"
        " remove that folder."
      )
  conversion = _convert(session, state)
  specs = session_lib.strip_for_evaluation(conversion.served.state_specs)
  with checkpointer.Checkpointer(to) as checkpoints:
    checkpoints.save(step, conversion.converted, specs=specs, data={})
    checkpoints.wait()
  for line in _lines(conversion, name):
    print(line)
  if not job.eval_inputs:
    print("loss: not measured, because there is no split to evaluate")
  losses = _losses(conversion.served, conversion.converted)
  for split, old in _losses(conversion.session, conversion.state).items():
    new = losses[split]
    print(
      f"{split}: loss {old:.6f} as trained, {new:.6f} served"
      f" ({new / old - 1:+.3%})"
    )
  print(f"{name} weights: {os.fspath(to)}", flush=True)
  return 0


def keep_trained_ranges(
  config: fdl.Buildable,
  quantization: str,
  run_dir: epath.Path,
  *,
  packages: Sequence[str] = (),
) -> tuple[str, ...]:
  """Makes a conversion keep the ranges that quantized training used.

  Args:
    config: Configuration of the job, changed in place.
    quantization: The knob, such as `int4:convert`.
    run_dir: The run, with the settings of its training.
    packages: Where experiments are looked for.

  Returns:
    A note about it, if any range changes.
  """
  choice = recipes.parse(quantization)
  if choice.mode is not recipes.Mode.CONVERT:
    return ()
  trained = run_files.find_trained_value(
    "quantization", run_dir, packages=packages
  )
  if trained not in (choice.name, f"{choice.name}:train"):
    return ()
  if not rewrites.keep_trained_ranges(config):
    return ()
  return (f"the run was trained with {choice.name}; its ranges are kept",)


def convert(
  job: job_lib.Job, run_dir: epath.Path, *, trained: Trained | None = None
) -> Conversion:
  """Converts the newest checkpoint of a run, and writes nothing (see `run`)."""
  return _convert(*_restore(job, run_dir, None, trained))


def _restore(
  job: job_lib.Job,
  run_dir: epath.Path,
  step: int | None,
  trained: Trained | None,
) -> tuple[session_lib.Session, train_state.TrainState]:
  session = session_lib.open_session(job, splits=job.eval_inputs)
  stored = session
  if trained is not None:
    stored = session_lib.open_session(trained.job, splits=())
  folder = run_dir / run_dirs.CHECKPOINTS
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    state = restore.restore_for_evaluation(
      stored, checkpoints, folder, step=step
    )
  if trained is not None:
    state = _merge(session, stored, state, trained.adapter)
    print(
      f"merged the adapters of rank {trained.adapter.rank} into the kernels"
    )
  return session, state


def _merge(
  session: session_lib.Session,
  adapted: session_lib.Session,
  state: train_state.TrainState,
  adapter: lora.Lora,
) -> train_state.TrainState:
  """Returns the state of a session, whose kernels have the adapters."""
  specs = session_lib.strip_for_evaluation(session.state_specs)

  def compute(state: train_state.TrainState) -> train_state.TrainState:
    values = _name_leaves(adapted.evaluation_variables(state))
    for name in adapted.absent:
      values[name] = adapted.dequantize(name, values)
    merged = lora.merge_variables(values, adapter)
    return train_state.TrainState(
      step=state.step,
      variables=jax.tree.map(
        lambda spec: merged[spec.name].astype(spec.dtype), specs.variables
      ),
      opt_state=(),
    )

  call = session.layout.jit(
    compute,
    out_shardings=session_lib.strip_for_evaluation(session.state_shardings),
    compiler_options=session.compiler_options,
  )
  return call(session_lib.strip_for_evaluation(state))


def _convert(
  session: session_lib.Session, state: train_state.TrainState
) -> Conversion:
  assert session.job.weights is not None
  name = recipes.parse(session.job.weights).name
  served = session_lib.open_session(
    dataclasses.replace(session.job, weights=f"{name}:serve"),
    splits=session.job.eval_inputs,
  )
  converted, errors, left = _quantize(session, served, state)
  method = recipes.find_recipe(name).calibration
  _check_errors(errors, method)
  _check_decoding(served, converted)
  return Conversion(
    session=session,
    state=state,
    served=served,
    converted=converted,
    errors=errors,
    left=left,
  )


def _quantize(
  session: session_lib.Session,
  served: session_lib.Session,
  state: train_state.TrainState,
) -> tuple[train_state.TrainState, dict[str, WeightErrors], tuple[str, ...]]:
  """Returns `converted`, `errors` and `left` of a `Conversion`."""
  model = session.job.task.model
  specs = session_lib.strip_for_evaluation(served.state_specs)
  shardings = session_lib.strip_for_evaluation(served.state_shardings)
  statistics = _calibrate(session, state)
  left = set()

  def compute(
    state: train_state.TrainState, statistics: Any
  ) -> tuple[train_state.TrainState, dict[str, dict[str, jax.Array]]]:
    values = session.evaluation_variables(state)
    # Only the quantized weights of the forward pass are used.
    batch = {k: jnp.zeros(x.shape, x.dtype) for k, x in session.batch.items()}
    _, made = model.apply(
      {**values, **statistics},
      batch,
      deterministic=True,
      method="loss",
      mutable=[
        served_einsum.COLLECTION,
        served_einsum.NOT_SERVED,
        auxiliary_loss.COLLECTION,
      ],
    )
    made = dict(variables.unbox(made))
    made.pop(auxiliary_loss.COLLECTION, None)
    for name in _name_leaves(made.pop(served_einsum.NOT_SERVED, {})):
      left.add(name.partition("/product/")[0])
    named = _name_leaves({**values, **made})
    new = train_state.TrainState(
      step=state.step,
      variables=jax.tree.map(lambda s: named[s.name], specs.variables),
      opt_state=(),
    )
    return new, _find_errors(served, specs.variables, named)

  call = session.layout.jit(
    compute,
    out_shardings=(shardings, session.layout.replicated),
    compiler_options=session.compiler_options,
  )
  new, errors = call(session_lib.strip_for_evaluation(state), statistics)
  measured = {
    name: WeightErrors(**{k: float(x) for k, x in of_one.items()})
    for name, of_one in errors.items()
  }
  return new, measured, tuple(sorted(left))


def _find_errors(
  served: session_lib.Session,
  specs: Any,
  named: Mapping[str, jax.Array],
) -> dict[str, dict[str, jax.Array]]:
  """Returns the errors of quantized weights, by the name of the parameter.

  Args:
    served: The session with quantized weights.
    specs: Its variables.
    named: Values of the parameters and of the quantized weights, by name.
  """
  errors = {}
  for spec in jax.tree.leaves(specs):
    parameter = served_einsum.stored_parameter(spec.name)
    if parameter is not None:
      prefix = spec.name.removesuffix("values")
      fields = {
        key.removeprefix(prefix): value
        for key, value in named.items()
        if key.startswith(prefix)
      }
      errors[parameter] = _errors(
        named[parameter],
        fields,
        number_format=served_einsum.get_format(spec),
        layer_shape=served.absent[parameter].layer_shape,
      )
  return errors


def _calibrate(
  session: session_lib.Session, state: train_state.TrainState
) -> dict[str, Any]:
  """Returns the collection of statistics; none if no recipe needs them.

  Raises:
    UserError: The training input ends before enough batches.
  """
  assert session.job.weights is not None
  model, name = session.job.task.model, calibration.COLLECTION

  def add(
    state: train_state.TrainState,
    statistics: dict[str, Any],
    batch: dict[str, jax.Array],
  ) -> dict[str, Any]:
    values = session.evaluation_variables(state)
    _, made = model.apply(
      {**values, **statistics},
      batch,
      deterministic=True,
      method="loss",
      mutable=[name, auxiliary_loss.COLLECTION],
    )
    made = dict(made)
    made.pop(auxiliary_loss.COLLECTION, None)
    return made

  evaluated = session_lib.strip_for_evaluation(state)
  if not jax.eval_shape(add, evaluated, {}, session.batch):
    return {}
  method = recipes.parse(session.job.weights).recipe.calibration
  count = _BATCHES if method is None else method.batches
  call = session.layout.jit(add, compiler_options=session.compiler_options)
  statistics: dict[str, Any] = {}
  source = session.job.train_input
  for number in range(count):
    try:
      batch = session.place(source.get_next())
    except StopIteration:
      raise user_error.UserError(
        f"The calibration of {session.job.weights!r} needs {count} batches, and"
        f" the training input ends after {number}."
      ) from None
    statistics = call(evaluated, statistics, batch)
  print(f"calibrated on the first {count} batches of the training input")
  return statistics


def _name_leaves(tree: Any) -> dict[str, Any]:
  """Returns the leaves of nested dicts by their logical names."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    "/".join(str(getattr(p, "key", p)) for p in path): leaf
    for path, leaf in leaves
  }


def _errors(
  exact: jax.Array,
  fields: Mapping[str, jax.Array],
  *,
  number_format: number_formats.NumberFormat,
  layer_shape: tuple[int, ...],
) -> dict[str, jax.Array]:
  """Returns the fields of the `WeightErrors` of one parameter."""
  inputs, zero = fields.get("inputs"), fields.get("zero")
  scale = served_einsum.load_scale(fields)
  stored = served_einsum.dequantize(
    fields["values"],
    scale,
    zero,
    number_format=number_format,
    layer_shape=layer_shape,
  )
  exact = exact.astype(jnp.float32)
  # Clipped on purpose: a smaller range has finer steps.
  steps = quantized_array.apply_by_group(operator.truediv, stored, scale)
  high = jnp.max(jnp.abs(steps))
  low, high = jnp.full(stored.shape, -high), jnp.full(stored.shape, high)
  if zero is not None:
    top = jnp.full(stored.shape, number_format.largest)
    low = quantized_array.apply_by_group(operator.sub, -top - 1, zero)
    high = quantized_array.apply_by_group(operator.sub, top, zero)
  low, high = (
    quantized_array.apply_by_group(operator.mul, x, scale) for x in (low, high)
  )
  if inputs is not None:
    stored, low, high = stored * inputs, low * inputs, high * inputs
  within = jnp.clip(exact, low, high)

  def share(of: jax.Array, whole: jax.Array) -> jax.Array:
    # A parameter of zeros is stored as zeros.
    return jnp.where(whole == 0, of, of / jnp.where(whole == 0, 1.0, whole))

  top = jnp.max(jnp.abs(exact))
  return {
    "largest": share(jnp.max(jnp.abs(stored - exact)), top),
    "mean": share(_root_mean_square(stored - exact), _root_mean_square(exact)),
    "rounding": share(jnp.max(jnp.abs(stored - within)), top),
  }


def _root_mean_square(x: jax.Array) -> jax.Array:
  return jnp.sqrt(jnp.mean(jnp.square(x)))


def _check_errors(
  errors: Mapping[str, WeightErrors], method: recipe_lib.Calibration | None
) -> None:
  if not errors:
    raise user_error.UserError(
      "No matmul that the quantization rules cover has a parameter of its layer"
      " as an operand, so there are no weights to convert."
    )
  for name, error in errors.items():
    match method:
      # It moves weights by more than a rounding, to correct others.
      case recipe_lib.Gptq():
        within = error.mean <= _MAX_MEAN
      case recipe_lib.Wanda() | recipe_lib.SparseGpt():
        within = error.mean <= _MAX_PRUNED
      case _:
        within = error.rounding <= _MAX_ROUNDING
    if not within:
      raise user_error.UserError(
        f"{name} cannot be quantized: it is not finite, or its layer multiplies"
        " something other than this parameter (its rounding error is"
        f" {error.rounding:.3g}, its mean error {error.mean:.3g}); exempt the"
        " layer in quantization_rules()."
      )


def _check_decoding(
  session: session_lib.Session, state: train_state.TrainState
) -> None:
  """Raises if decoding reads an absent parameter, which is NaN."""
  task = session.job.task
  if not task.generates or isinstance(task.model, contracts.EncoderDecoder):
    return

  def run(state: train_state.TrainState) -> jax.Array:
    values = session.evaluation_variables(state)
    ids = jnp.ones((session.layout.shards(axes.BATCH), 1), jnp.int32)
    positions = jnp.zeros_like(ids)
    _, cache = model_steps.make_prefill(task.model, values)(
      ids, positions, ids, cache_length=2
    )
    step = model_steps.make_decode_step(task.model, values)
    logits, _ = step(cache, ids, positions + 1, ids)
    return jnp.isfinite(logits).all()

  call = session.layout.jit(run, out_shardings=session.layout.replicated)
  if not call(session_lib.strip_for_evaluation(state)):
    raise user_error.UserError(
      "Decoding is not finite with quantized weights: a layer uses its"
      " parameters there in other matmuls than in training; exempt it in"
      " quantization_rules()."
    )


def _losses(
  session: session_lib.Session, state: train_state.TrainState
) -> dict[str, float]:
  results = evaluation.Evaluator(session).evaluate(state) or {}
  return {split: values["loss"] for split, values in results.items()}


def _lines(conversion: Conversion, name: str) -> Iterator[str]:
  """Yields the changes of size and the errors of a conversion."""
  before, after = (
    sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(specs))
    for specs in (
      conversion.session.state_specs.variables,
      conversion.served.state_specs.variables,
    )
  )
  yield (
    f"bytes of variables: {before:,} as trained, {after:,} with {name} weights"
    f" ({after / before:.1%})"
  )
  for parameter, error in conversion.errors.items():
    yield (
      f"quantization error: {error.mean:.2%} of the root mean square, at most"
      f" {error.largest:.2%} of the largest weight: {parameter}"
    )
  for matmul in conversion.left:
    yield (
      f"not in {name}, because its layer has no parameter of this name and"
      f" shape: matmul {matmul}"
    )
