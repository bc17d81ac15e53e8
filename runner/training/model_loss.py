"""A linen model as the plain loss function that steps are made of."""

from typing import Any

from flax import core as flax_core
from flax import linen as nn
import jax

from paxon.layers import auxiliary_loss, shared, summaries, tied_parts
from paxon.layers.attention import cudnn_attention
from paxon.learners import metrics as metrics_lib
from paxon.learners import train_step, variable_groups
from paxon.runner import user_error
from paxon.runner.training import layer_summaries
from paxon.sharding import variables


def make_loss_fn(
  model: nn.Module, *, specs: variable_groups.Specs, deterministic: bool
) -> train_step.LossFn:
  """Returns `(variables, batch, rngs) -> LossOutput`.

  Args:
    model: Has the method `loss(batch, *, deterministic)`.
    specs: A `VariableSpec` for each variable of the model.
    deterministic: Whether dropout is off. Then no collection changes either,
      and layers tell no summaries.

  Raises:
    ValueError: A collection mixes variables that the forward pass replaces with
      others, which linen cannot express.
  """
  mutable = [auxiliary_loss.COLLECTION]
  if not deterministic:
    mutable += [*replaced_collections(specs), summaries.COLLECTION]

  def loss_fn(
    values: variable_groups.Tree,
    batch: metrics_lib.Batch,
    rngs: dict[str, jax.Array],
  ) -> train_step.LossOutput:
    (loss, metrics, outputs), new = model.apply(
      values,
      batch,
      deterministic=deterministic,
      method="loss",
      rngs=rngs,
      mutable=mutable,
    )
    new = dict(new)
    sown = new.pop(summaries.COLLECTION, {})
    # The model has added them to its loss.
    new.pop(auxiliary_loss.COLLECTION, None)
    metrics = metrics | layer_summaries.metrics(sown, specs=specs)
    return train_step.LossOutput(loss, metrics, outputs, new)

  return loss_fn


def random_streams(model: nn.Module) -> tuple[str, ...]:
  """Returns the names of the random keys that training gives a model.

  Those of every model, and those that its parts name in `random_streams`.
  """
  names = dict.fromkeys(train_step.STREAMS)

  def visit(part: nn.Module) -> None:
    names.update(dict.fromkeys(getattr(part, "random_streams", ())))
    for _, inner in shared.parts_of(part):
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

  Args:
    model: Has the method `loss`.
    batch: Arrays, or their shapes and dtypes.

  Raises:
    user_error.UserError: One part with parameters stands in two places.
  """

  def of(model: nn.Module) -> Any:
    # Of attention only the shapes matter.
    with cudnn_attention.stand_in():
      return jax.eval_shape(lambda batch: init(model, batch), batch)

  try:
    tied_parts.check(model, of)
  except tied_parts.TiedError as error:
    raise user_error.UserError(str(error)) from error
  return of(model)


def init(model: nn.Module, batch: Any) -> Any:
  """Returns linen's own initial values; ours come from `sharding`."""
  return model.init(
    {"params": jax.random.key(0)},
    batch,
    deterministic=True,
    method="loss",
    # What layers sow is no variable.
    mutable=flax_core.DenyList(("intermediates", summaries.COLLECTION)),
  )
