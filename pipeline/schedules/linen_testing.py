"""A small linen model with all kinds of variables, for tests of schedules."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers import summaries
from paxon.layers import testing as layers_testing
from paxon.layers.losses import auxiliary_loss
from paxon.layers.stacks import shared
from paxon.learners import gradients, loss_function, metrics, variable_groups
from paxon.pipeline import stage_sharding
from paxon.pipeline import testing as pipeline_testing
from paxon.pipeline.schedules import scheduled_stack
from paxon.quantization import einsum, matmuls
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import axes, layout, logical, mesh, variables
from paxon.sharding import rules as rules_lib

VOCAB, EMBED, ROWS, LENGTH = 6, 4, 16, 3


class Kernel(nn.Module):
  """A matmul whose result is sharded like those of layers."""

  names: tuple[str, str]
  result: str
  product: Callable[..., jax.Array] = jnp.einsum

  @nn.compact
  def __call__(self, x):
    """Returns the matmul."""
    init = logical.partitioned(nn.initializers.lecun_normal(), self.names)
    kernel = self.param("kernel", init, (EMBED, EMBED))
    y = matmuls.call(self.product, "kernel", "BTD,DE->BTE", x, kernel)
    return logical.constrain(y, (axes.BATCH, axes.LENGTH, self.result))


class Block(auxiliary_loss.Source, nn.Module):
  """A layer with all kinds of variables and arguments.

  Attributes:
    up: The first matmul of its branch.
    out: The second.
    more: Called between them with the branch and positions.
  """

  up: nn.Module
  out: nn.Module
  more: nn.Module | None = None

  @nn.compact
  def __call__(self, x, positions, *, deterministic):
    """Returns `x` and a branch that depends on all arguments."""
    scale = self.variable(
      "scales",
      "scale",
      variables.make_boxed_init(
        nn.initializers.ones,
        (None,),
        shape=(1,),
        dtype=np.float32,
        update=variables.UpdateRule.OVERWRITE_WITH_GRADIENT,
        combine=variables.CombineRule.MAX,
      ),
    )
    hidden = jnp.tanh(self.up(pipeline_testing.record_scale(x, scale.value)))
    hidden *= jnp.cos(positions.astype(x.dtype))[:, :, None]
    if self.more is not None:
      hidden = self.more(hidden, positions)
    # Not additive over sequences, so it shows if data shards are separate.
    auxiliary_loss.add(self, "size", jnp.sqrt(jnp.mean(hidden**2)))
    summaries.summarize(self, "rms", jnp.sqrt(jnp.mean(x**2)))
    del deterministic
    return x + self.out(hidden)


class Model(nn.Module):
  """An embedding, a stack and a head, as language models have them."""

  stack: nn.Module
  product: Callable[..., jax.Array] = jnp.einsum

  @nn.compact
  def loss(self, batch, *, deterministic=False):
    """Returns a weighted loss, metrics and outputs."""
    table = self.param(
      "table",
      logical.partitioned(
        nn.initializers.normal(1.0), (axes.VOCAB, axes.EMBED)
      ),
      (VOCAB, EMBED),
    )
    # `embed` is not sharded, as in `layers.embedding`: XLA's partitioner fails
    # if ids and both dimensions of a table are sharded, and `stage` is manual.
    whole = logical.constrain(table, (axes.VOCAB, axes.ACTIVATION_EMBED))
    x = jnp.take(whole, batch["ids"], axis=0, mode="fill")
    x = logical.constrain(x, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED))
    x = self.stack(x, batch["positions"], deterministic=deterministic)
    logits = matmuls.call(self.product, "head", "BTD,VD->BTV", x, table)
    picked = jax.nn.one_hot(batch["targets"], VOCAB)
    nll = -jnp.sum(picked * jax.nn.log_softmax(logits), axis=-1)
    weights = batch["factor"] * batch["weights"]
    weight = jnp.sum(weights)
    added, more = auxiliary_loss.collect(self, factor=0.5, weight=weight)
    loss = jnp.sum(nll * weights) + added
    return (loss, weight), more, {"nll": nll}


def block(
  *,
  tied: bool = False,
  recipe: recipe_lib.Recipe | None = None,
  more: nn.Module | None = None,
) -> Block:
  """Returns the layer.

  Args:
    tied: Whether all layers share their second matmul.
    recipe: Quantization recipe of its matmuls, or None.
    more: As in `Block`.
  """
  up = Kernel((axes.EMBED, axes.MLP), axes.ACTIVATION_MLP, product(recipe))
  names = axes.MLP, axes.EMBED
  out = Kernel(names, axes.ACTIVATION_EMBED, product(recipe))
  return Block(up, shared.shared("out", out) if tied else out, more)


def product(recipe: recipe_lib.Recipe | None) -> Callable[..., jax.Array]:
  """Returns the contraction of one layer."""
  return jnp.einsum if recipe is None else einsum.QuantizedEinsum(recipe)


def batch() -> dict[str, jax.Array]:
  """Returns sequences with different weights, and a scalar."""
  rng = np.random.default_rng(0)
  return {
    "factor": jnp.float32(0.5),
    "ids": layers_testing.array(
      rng.integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32
    ),
    "targets": layers_testing.array(
      rng.integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32
    ),
    "positions": layers_testing.make_positions(ROWS, LENGTH),
    "weights": layers_testing.array(rng.uniform(size=(ROWS, LENGTH))),
  }


def loss_fn(model: nn.Module) -> loss_function.LossFn:
  """Returns the loss function of a model, with the values its layers sow."""

  def fn(values: Any, batch: Any, rngs: Any) -> loss_function.LossOutput:
    made: Any = model.apply(
      values,
      batch,
      method="loss",
      rngs=rngs,
      mutable=[auxiliary_loss.COLLECTION, summaries.COLLECTION],
    )
    (loss, metrics, outputs), new = made
    sown = dict(new).get(summaries.COLLECTION, {})
    for rms in jax.tree.leaves(sown):
      metrics = metrics | {"rms": (rms, jnp.float32(1))}
    return loss_function.LossOutput(loss, metrics, outputs, {})

  return fn


def nll(batch: Any, outputs: Any) -> Any:
  """A metric function."""
  total = jnp.sum(outputs["nll"] * batch["weights"])
  return {
    "nll": (total, jnp.sum(batch["weights"])),
    # Negative, unlike the values of stages without a head.
    **metrics.maximum("nll", -outputs["nll"], weights=batch["weights"]),
  }


def make_value_gradient_fn(
  gradient_fn: gradients.GradientFn, specs: Any
) -> Any:
  """Returns `(values, batch, rngs) -> gradients, next values, metrics`."""
  group = variable_groups.Group

  def fn(values: Any, batch: Any, rngs: Any) -> Any:
    own = gradients.Variables(
      params=variable_groups.select(values, group.OPTIMIZED, specs=specs),
      overwritten=variable_groups.select(
        values, group.OVERWRITTEN, specs=specs
      ),
      constant={},
    )
    made = gradient_fn(own, batch, rngs)
    return made.params, made.overwritten, made.metrics

  return fn


def make_model(
  own: nn.Module, recipe: recipe_lib.Recipe | None = None
) -> Model:
  """Returns the model of a stack, whose head may be quantized."""
  return Model(own, product(recipe))


def make_variables(model: Model) -> tuple[Any, Any]:
  """Returns values of a model's variables, and their specs."""
  specs = layers_testing.specs(model, batch(), method="loss")
  values = layers_testing.random_values(model, batch(), method="loss")
  return jax.tree.map(jnp.abs, values), specs


def compute_accumulated(
  model: Model, microbatches: int, *, values: Any, specs: Any, rngs: Any = None
) -> Any:
  """Returns gradients of a learner that accumulates over microbatches.

  Args:
    model: Model without stages.
    microbatches: Number of microbatches.
    values: Values of the variables.
    specs: A `VariableSpec` for each variable.
    rngs: Random keys by stream.
  """
  run = gradients.make_gradient_fn(
    loss_fn(model),
    metric_fns=(nll,),
    num_microbatches=microbatches,
    specs=specs,
  )
  return jax.jit(make_value_gradient_fn(run, specs))(
    values, batch(), rngs or {}
  )


def gradient_fn(model: Any, specs: Any) -> gradients.GradientFn:
  """Returns the gradients of a model with a scheduled stack."""
  return model.stack.make_gradient_fn(
    model, loss_fn_of=loss_fn, metric_fns=(nll,), specs=specs
  )


def compute_scheduled(
  model: Model, on: str, *, values: Any, specs: Any, rngs: Any = None
) -> Any:
  """Returns gradients of a schedule on a mesh.

  Args:
    model: Model with a scheduled stack.
    on: The mesh as text.
    values: Values of the variables.
    specs: A `VariableSpec` for each variable.
    rngs: Random keys by stream.
  """
  own: Any = model.stack
  number = int(np.prod([int(part.split("=")[1]) for part in on.split(",")]))
  made = layout.Layout(
    mesh.make_mesh(mesh.MeshSpec.parse(on), devices=jax.devices()[:number]),
    stage_sharding.with_stages(
      rules_lib.DEFAULT_RULES,
      num_stages=own.num_stages,
      num_groups=own.num_groups(),
      circular_repeats=own.circular_repeats,
    ),
  )
  placed = layers_testing.place(values, made.shardings(specs))
  arrays = {
    name: layers_testing.place(
      x, made.batch_sharding(x.ndim) if x.ndim else made.replicated
    )
    for name, x in batch().items()
  }
  run = made.jit(make_value_gradient_fn(gradient_fn(model, specs), specs))
  given = placed, arrays, rngs or {}
  compiled = made.lower(run.trace(*given)).compile()
  # Such a program would deadlock.
  assert not scheduled_stack.count_branch_permutes(compiled.as_text() or "")
  found = compiled(*given)
  if own.circular_repeats == 1 and own.num_groups() % own.num_stages == 0:
    _assert_placed_like(found[0], placed)
  return found


def _assert_placed_like(gradients: Any, values: Any) -> None:
  """Checks that gradients are sharded like their weights."""
  flat: Any = traverse_util.flatten_dict(values)
  found: Any = traverse_util.flatten_dict(gradients)
  for path, got in found.items():
    wanted = flat[path].sharding.shard_shape(got.shape)
    assert got.sharding.shard_shape(got.shape) == wanted, path


def assert_equal(got: Any, want: Any, *, rtol: float = 1e-5) -> None:
  """Compares trees; a leaf may be off by `rtol` of its largest entry."""
  assert jax.tree.structure(got) == jax.tree.structure(want)

  def check(path: Any, a: Any, b: Any) -> None:
    off = np.max(np.abs(np.asarray(a) - np.asarray(b)))
    largest = np.max(np.abs(b))
    name = jax.tree_util.keystr(path)
    assert off <= rtol * largest, f"{name}: off by {off} of {largest}"

  jax.tree.map_with_path(check, got, want)
