"""Makes weights of few bits of a run's parameters, and says what it cost."""

from collections.abc import Iterator, Mapping
import dataclasses
import os
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp

from paxon.layers.decoding import model_steps
from paxon.learners import train_state
from paxon.quantization import number_formats, recipes, served_einsum
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.programs import evaluation, restoring, serving
from paxon.runner.programs import session as session_lib
from paxon.sharding import axes, variables

# No weight is rounded by as much: those of four bits by 1/14 of the largest.
_WRONG = 0.2


def run(job: job_lib.Job, run_dir: epath.Path) -> int:
  """Converts the newest checkpoint, and evaluates it before and after.

  Args:
    job: The resolved configuration, built, of `quantization="...:convert"`.
    run_dir: The folder of the run.

  Returns:
    The exit status, 0.

  Raises:
    UserError: There is no checkpoint that fits the job, it is converted
      already, or a layer uses its weights in another way than by a product.
  """
  assert job.weights is not None
  name = recipes.parse(job.weights).name
  session = session_lib.open_session(job)
  folder = run_dir / run_dirs.CHECKPOINTS
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    state = restoring.restore_for_evaluation(session, checkpoints, folder)
  step = int(state.step)
  to = serving.folder(job, run_dir)
  with checkpointer.Checkpointer(to, read_only=True) as checkpoints:
    if step in checkpoints.steps():
      raise user_error.UserError(
        f"The checkpoint of step {step} is converted already, in"
        f" {os.fspath(to)}; use it with --fdl.quantization={name}:serve, or"
        " remove that folder."
      )
  served = session_lib.open_session(
    dataclasses.replace(job, weights=f"{name}:serve")
  )
  converted, errors, left = _converted(session, served, state)
  _check_errors(errors)
  _check_decoding(served, converted)
  specs = session_lib.for_evaluation(served.state_specs)
  with checkpointer.Checkpointer(to) as checkpoints:
    checkpoints.save(step, converted, specs=specs, data={})
    checkpoints.wait()
  before = _bytes(session_lib.for_evaluation(session.state_specs))
  for line in _lines(before, _bytes(specs), errors, name):
    print(line)
  for product in left:
    print(
      f"not in {name}, because its layer has no parameter of this name and"
      f" shape: the product {product}"
    )
  _print_losses(session, state, served, converted)
  print(f"{name} weights: {os.fspath(to)}", flush=True)
  return 0


def _converted(
  session: session_lib.Session,
  served: session_lib.Session,
  state: train_state.TrainState,
) -> tuple[train_state.TrainState, dict[str, float], list[str]]:
  """Returns the state with quantized weights, their errors, and what is left.

  Errors are those of the worst weight of each parameter, as a share of the
  largest one, by the name of the parameter. Left are products that the rules
  cover, and that multiply no parameter of their layer.
  """
  model = session.job.task.model
  specs = session_lib.for_evaluation(served.state_specs)
  shardings = session_lib.for_evaluation(served.state_shardings)
  left = set()

  def compute(
    state: train_state.TrainState,
  ) -> tuple[train_state.TrainState, dict[str, jax.Array]]:
    values = session.evaluation_variables(state)
    # Of the forward pass only the weights are used.
    batch = {k: jnp.zeros(x.shape, x.dtype) for k, x in session.batch.items()}
    _, made = model.apply(
      values,
      batch,
      deterministic=True,
      method="loss",
      mutable=[served_einsum.COLLECTION, served_einsum.NOT_SERVED],
    )
    made = dict(variables.unbox(made))
    for name in _named(made.pop(served_einsum.NOT_SERVED, {})):
      left.add(name.partition("/product/")[0])
    named = _named({**values, **made})
    errors = {}
    for name in named:
      parameter = served_einsum.stored_parameter(name)
      if parameter is not None:
        errors[parameter] = _error(
          named[parameter],
          named[name],
          named[name.rpartition("/")[0] + "/scale"],
          served.absent[parameter],
        )
    new = train_state.TrainState(
      step=state.step,
      variables=jax.tree.map(lambda s: named[s.name], specs.variables),
      opt_state=(),
    )
    return new, errors

  call = session.layout.jit(
    compute,
    out_shardings=(shardings, session.layout.replicated),
    compiler_options=session.compiler_options,
  )
  new, errors = call(session_lib.for_evaluation(state))
  return (
    new,
    {name: float(error) for name, error in errors.items()},
    sorted(left),
  )


def _named(tree: Any) -> dict[str, Any]:
  """Returns the leaves of nested dicts by their logical names."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    "/".join(str(getattr(p, "key", p)) for p in path): leaf
    for path, leaf in leaves
  }


def _error(
  exact: jax.Array,
  values: jax.Array,
  scale: jax.Array,
  spec: variables.VariableSpec,
) -> jax.Array:
  """Returns the largest error of stored weights, as a share of the largest."""
  formats = {jnp.dtype(f.dtype): f for f in number_formats.FORMATS.values()}
  number_format = formats[values.dtype]
  if number_format.is_integer:
    is_packed = values.shape != spec.shape
    number_format = number_formats.INT4 if is_packed else number_formats.INT8
  stored = served_einsum.restored(
    values, scale, number_format=number_format, layer_shape=spec.layer_shape
  )
  exact = exact.astype(jnp.float32)
  return jnp.max(jnp.abs(stored - exact)) / jnp.max(jnp.abs(exact))


def _check_errors(errors: Mapping[str, float]) -> None:
  if not errors:
    raise user_error.UserError(
      "No product that the quantization rules cover multiplies a parameter of"
      " its layer, so there are no weights to convert."
    )
  for name, error in errors.items():
    if not error <= _WRONG:
      raise user_error.UserError(
        f"{name} cannot be stored in few bits: it is not finite, or its layer"
        " multiplies something else than this parameter (found by an error of"
        f" {error:.3g}); exempt the layer in quantization_rules()."
      )


def _check_decoding(
  session: session_lib.Session, state: train_state.TrainState
) -> None:
  """Raises where decoding reads a parameter that is absent, which is NaN."""
  task = session.job.task
  if not task.generates or callable(getattr(task.model, "encode", None)):
    return

  def run(state: train_state.TrainState) -> jax.Array:
    values = session.evaluation_variables(state)
    ids = jnp.ones((session.layout.shards(axes.BATCH), 1), jnp.int32)
    places = jnp.zeros_like(ids)
    _, cache = model_steps.prefill(task.model, values)(
      ids, places, ids, cache_length=2
    )
    step = model_steps.decode_step(task.model, values)
    logits, _ = step(cache, ids, places + 1, ids)
    return jnp.isfinite(logits).all()

  call = session.layout.jit(run, out_shardings=session.layout.replicated)
  if not call(session_lib.for_evaluation(state)):
    raise user_error.UserError(
      "Decoding is not finite with weights of few bits: a layer uses its"
      " parameters there in other products than in training (as latent"
      " attention does); exempt it in quantization_rules()."
    )


def _bytes(specs: Any) -> int:
  return sum(
    spec.dtype.itemsize * jax.ShapeDtypeStruct(spec.shape, spec.dtype).size
    for spec in jax.tree.leaves(specs)
  )


def _lines(
  before: int, after: int, errors: Mapping[str, float], name: str
) -> Iterator[str]:
  """Yields what a conversion changed."""
  yield (
    f"bytes of variables: {before:,} as trained, {after:,} with {name} weights"
    f" ({after / before:.1%})"
  )
  for parameter, error in errors.items():
    yield f"largest error of a weight, of the largest: {error:.2%} {parameter}"


def _print_losses(
  session: session_lib.Session,
  state: train_state.TrainState,
  served: session_lib.Session,
  converted: train_state.TrainState,
) -> None:
  """Evaluates both, and prints the difference."""
  before = evaluation.Evaluator(session).evaluate(state) or {}
  after = evaluation.Evaluator(served).evaluate(converted) or {}
  for split, values in before.items():
    old, new = values["loss"], after[split]["loss"]
    print(
      f"{split}: loss {old:.6f} as trained, {new:.6f} served"
      f" ({new / old - 1:+.3%})"
    )
