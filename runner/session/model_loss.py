"""A linen model as a plain loss function, with the metrics its layers sow."""

from collections.abc import Mapping
import re
from typing import Any

from flax import core as flax_core
from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.layers import contracts, summaries
from paxon.layers.attention import cudnn_attention
from paxon.layers.losses import auxiliary_loss
from paxon.layers.stacks import shared, tied_parts
from paxon.learners import loss_function, train_step, variable_groups
from paxon.learners import metrics as metrics_lib
from paxon.runner import user_error
from paxon.sharding import axes, logical, target, variables

_BLOCK = re.compile(r"blocks_(\d+)")
# A layer of an incomplete last group of a stack.
_REST = re.compile(axes.LAYERS + r"_(\d+)")


def make_loss_fn(
  model: nn.Module,
  *,
  specs: variable_groups.Specs,
  deterministic: bool,
  summary_level: int = 0,
) -> train_step.LossFn:
  """Returns `(variables, batch, rngs) -> LossOutput`.

  Args:
    model: Has the method `loss(batch, *, deterministic)`.
    specs: A `VariableSpec` for each variable of the model.
    deterministic: Whether dropout is off. Then collections do not change, and
      there are no layer summaries.
    summary_level: Level up to which layers record summaries.

  Raises:
    ValueError: A collection mixes variables that the forward pass replaces with
      others, which linen cannot express.
  """
  mutable = [auxiliary_loss.COLLECTION]
  recorded = () if deterministic else summaries.COLLECTIONS[: summary_level + 1]
  if not deterministic:
    mutable += [*replaced_collections(specs), *recorded]

  def loss_fn(
    values: variable_groups.Tree,
    batch: metrics_lib.Batch,
    rngs: dict[str, jax.Array],
  ) -> train_step.LossOutput:
    (loss, metrics, outputs), new = model.apply(
      # `Session.evaluation_variables` are constrained.
      values if deterministic else logical.constrain_variables(values, specs),
      batch,
      deterministic=deterministic,
      method="loss",
      rngs=rngs,
      mutable=mutable,
    )
    new = dict(new)
    for collection in recorded:
      sown = new.pop(collection, {})
      metrics = metrics | summary_metrics(sown, specs=specs)
    # Already in the loss.
    new.pop(auxiliary_loss.COLLECTION, None)
    return train_step.LossOutput(loss, metrics, outputs, new)

  return loss_fn


def random_streams(model: nn.Module) -> tuple[str, ...]:
  """Returns the names of a model's random streams in training.

  The standard ones, and those that modules declare in `random_streams`.
  """
  names = dict.fromkeys(train_step.STREAMS)

  def visit(module: nn.Module) -> None:
    if isinstance(module, contracts.HasRandomStreams):
      names.update(dict.fromkeys(module.random_streams))
    for _, inner in shared.iterate_submodules(module):
      visit(inner)

  visit(model)
  return tuple(names)


def replaced_collections(specs: variable_groups.Specs) -> list[str]:
  """Returns the collections whose variables the forward pass replaces."""
  replaced = []
  for collection, tree in specs.items():
    rules: dict[bool, variables.VariableSpec] = {}
    for spec in jax.tree.leaves(tree):
      is_replaced = spec.update is variables.UpdateRule.REPLACE
      rules[is_replaced] = spec
    if len(rules) == 2:
      raise ValueError(
        f"The collection {collection!r} holds {rules[True].name}, which the"
        f" forward pass replaces, and {rules[False].name}, which it does not;"
        " put them in two collections."
      )
    if True in rules:
      replaced.append(collection)
  return replaced


def abstract_variables(model: nn.Module, batch: Any) -> Any:
  """Returns the shapes of the model's variables, in their boxes.

  Raises:
    user_error.UserError: One configured module has parameters in two places.
  """

  def shapes(model: nn.Module) -> Any:
    # Only shapes matter.
    with cudnn_attention.stand_in(), target.any_platform():
      return jax.eval_shape(lambda batch: init(model, batch), batch)

  try:
    tied_parts.check(model, shapes)
  except tied_parts.TiedError as error:
    raise user_error.UserError(str(error)) from error
  return shapes(model)


def init(model: nn.Module, batch: Any) -> Any:
  """Returns linen's own initial values; ours come from `sharding`."""
  return model.init(
    {"params": jax.random.key(0)},
    batch,
    deterministic=True,
    method="loss",
    # Sown values are not variables.
    mutable=flax_core.DenyList(("intermediates", *summaries.COLLECTIONS)),
  )


def summary_metrics(
  sown: Mapping[str, Any], *, specs: variable_groups.Specs
) -> loss_function.Metrics:
  """Returns sown values as metrics `summaries/<path>/<name>`.

  A value of a scanned stack has one entry for each group of layers. It stays
  one metric of several values, whose name has the layers' numbers
  (`learners.metrics.indexed`).
  """
  result = {}
  flat: dict[Any, Any] = traverse_util.flatten_dict(variables.unbox(sown))
  for path, values in flat.items():
    calls = jax.tree.leaves(values)
    names, num_stacked = _names(path, specs)
    name = "/".join((summaries.COLLECTION, *names))
    kept = summaries.num_dimensions(name)
    means = jnp.stack([_mean(name, each, num_stacked, kept) for each in calls])
    result[name] = (jnp.sum(means, axis=0), jnp.float32(len(calls)))
  return result


def _mean(
  name: str, value: jax.Array, num_stacked: int, kept: int
) -> jax.Array:
  """Averages over all dimensions but those of stacks and the last `kept`."""
  if value.ndim < num_stacked + kept:
    raise ValueError(
      f"The summary {name} has the shape {value.shape}, and its path leads"
      f" through {num_stacked} stacks; give no module the name of a stack's"
      " submodules."
    )
  rest = tuple(range(num_stacked, value.ndim - kept))
  return jnp.mean(value.astype(jnp.float32), axis=rest)


def _names(
  path: tuple[str, ...], specs: variable_groups.Specs
) -> tuple[list[str], int]:
  """Returns the components of a metric's name, and the number of stacks."""
  names: list[str] = []
  num_stacked = 0
  for i, part in enumerate(path):
    block, rest = _BLOCK.fullmatch(part), _REST.fullmatch(part)
    if block and i and path[i - 1] == axes.LAYERS:
      period = _period(path[:i], specs)
      names.append(metrics_lib.make_indexed(int(block[1]), period))
      num_stacked += 1
    elif rest:
      names += [axes.LAYERS, rest[1]]
    else:
      names.append(part)
  return names, num_stacked


def _period(path: tuple[str, ...], specs: variable_groups.Specs) -> int:
  """Returns the number of blocks in a group of the stack at `path`."""
  blocks = set()
  for collection in specs.values():
    node = collection
    for part in path:
      node = node.get(part, {}) if isinstance(node, Mapping) else {}
    if isinstance(node, Mapping):
      blocks |= {name for name in node if _BLOCK.fullmatch(name)}
  return max((int(name.rpartition("_")[2]) + 1 for name in blocks), default=1)
