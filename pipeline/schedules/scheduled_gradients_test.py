"""Tests that a schedule's step is a learner's that accumulates.

The grid: schedules, 1, 2 and 4 stages, numbers of microbatches, several chunks
a stage, layers that do not divide, tied or not, kept residuals or not, with
mesh axes for rows and for weights.
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import auxiliary_loss, shared, stack, summaries
from paxon.layers import testing as layers_testing
from paxon.learners import gradients, loss_function, variable_groups
from paxon.pipeline import stage_rules
from paxon.pipeline.schedules import (
  by_name,
  gpipe,
  interleaved,
  lowering,
  one_f_one_b,
  scheduled_gradients,
  scheduled_stack,
  zero_bubble,
)
from paxon.sharding import axes, layout, logical, mesh, variables
from paxon.sharding import rules as rules_lib

VOCAB, EMBED, ROWS, LENGTH = 6, 4, 16, 3
SAVE = lowering.Residuals.SAVE


@jax.custom_vjp
def _scaled(x, scale):
  """Returns `x`; the gradient of `scale` is what it is to be next."""
  del scale
  return x


_scaled.defvjp(
  lambda x, scale: (x, None), lambda _, g: (g, jnp.max(jnp.abs(g))[None])
)


class _Kernel(nn.Module):
  """A product, pinned as those of layers are."""

  names: tuple[str, str]
  result: str

  @nn.compact
  def __call__(self, x):
    init = logical.partitioned(nn.initializers.lecun_normal(), self.names)
    kernel = self.param("kernel", init, (EMBED, EMBED))
    y = jnp.einsum("BTD,DE->BTE", x, kernel)
    return logical.constrain(y, (axes.BATCH, axes.LENGTH, self.result))


class Block(auxiliary_loss.Source, nn.Module):
  """A layer with all that a schedule must hand over."""

  out: nn.Module

  @nn.compact
  def __call__(self, x, positions, *, deterministic):
    """Returns `x` and a branch that depends on all arguments."""
    scale = self.variable(
      "scales",
      "scale",
      variables.boxed(
        nn.initializers.ones,
        (None,),
        shape=(1,),
        dtype=np.float32,
        update=variables.UpdateRule.OVERWRITE_WITH_GRADIENT,
        combine=variables.CombineRule.MAX,
      ),
    )
    up = _Kernel((axes.EMBED, axes.MLP), axes.ACTIVATION_MLP, name="up")
    hidden = jnp.tanh(up(_scaled(x, scale.value)))
    hidden *= jnp.cos(positions.astype(x.dtype))[:, :, None]
    # Not a sum over rows: that of a part of them would be another one.
    auxiliary_loss.add(self, "size", jnp.sqrt(jnp.mean(hidden**2)))
    summaries.summarize(self, "rms", jnp.sqrt(jnp.mean(x**2)))
    del deterministic
    return x + self.out(hidden)


class Model(nn.Module):
  """An embedding, a stack and a head, as language models have them."""

  stack: nn.Module

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
    # Rows whole, as `layers.embedding` has them. XLA's partitioner fails where
    # rows of ids and both dimensions of a table are split, and `stage` is not
    # its own.
    whole = logical.constrain(table, (axes.VOCAB, axes.ACTIVATION_EMBED))
    x = jnp.take(whole, batch["ids"], axis=0, mode="fill")
    x = logical.constrain(x, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED))
    x = self.stack(x, batch["positions"], deterministic=deterministic)
    logits = jnp.einsum("BTD,VD->BTV", x, table)
    picked = jax.nn.one_hot(batch["targets"], VOCAB)
    nll = -jnp.sum(picked * jax.nn.log_softmax(logits), axis=-1)
    weights = batch["weights"]
    weight = jnp.sum(weights)
    added, more = auxiliary_loss.weighted(self, factor=0.5, weight=weight)
    loss = jnp.sum(nll * weights) + added
    return (loss, weight), more, {"nll": nll}


def _loss_fn(model):
  def loss_fn(values, batch, rngs):
    (loss, metrics, outputs), new = model.apply(
      values,
      batch,
      method="loss",
      rngs=rngs,
      mutable=[auxiliary_loss.COLLECTION, summaries.COLLECTION],
    )
    sown = dict(new).get(summaries.COLLECTION, {})
    for rms in jax.tree.leaves(sown):
      metrics = metrics | {"rms": (rms, jnp.float32(1))}
    return loss_function.LossOutput(loss, metrics, outputs, {})

  return loss_fn


def _nll(batch, outputs):
  total = jnp.sum(outputs["nll"] * batch["weights"])
  return {"nll": (total, jnp.sum(batch["weights"]))}


def _block(*, tied):
  out = _Kernel((axes.MLP, axes.EMBED), axes.ACTIVATION_EMBED)
  return Block(shared.shared("out", out) if tied else out)


def _batch():
  rng = np.random.default_rng(0)
  return {
    "ids": jnp.asarray(rng.integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32),
    "targets": jnp.asarray(rng.integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32),
    "positions": layers_testing.counted(ROWS, LENGTH),
    "weights": jnp.asarray(rng.uniform(size=(ROWS, LENGTH)), jnp.float32),
  }


def _groups(values, specs):
  group = variable_groups.Group
  return gradients.Variables(
    params=variable_groups.select(values, group.OPTIMIZED, specs=specs),
    overwritten=variable_groups.select(values, group.OVERWRITTEN, specs=specs),
    constant={},
  )


def _of_values(gradient_fn, specs):
  def fn(values, batch):
    made = gradient_fn(_groups(values, specs), batch, {})
    return made.params, made.overwritten, made.metrics

  return fn


@functools.cache
def _sequential(num_layers, microbatches, tied):
  """Variables, their specs, and what a learner computes without stages."""
  model = Model(stack.Stack((_block(tied=tied),), num_layers))
  batch = _batch()
  specs = layers_testing.specs(model, batch, method="loss")
  values = layers_testing.random_values(model, batch, method="loss")
  run = gradients.make_gradient_fn(
    _loss_fn(model),
    metric_fns=(_nll,),
    num_microbatches=microbatches,
    specs=specs,
  )
  return values, specs, jax.jit(_of_values(run, specs))(values, batch)


def _case(make, stages, microbatches, num_layers, on="", **fields):
  name = f"{make.__module__.rpartition('.')[2]}-{make.__name__}-{stages}p"
  name += f"-{microbatches}m-{num_layers}l-{on}" + "".join(
    f"-{f}" for f in fields
  )
  return pytest.param(
    make, stages, microbatches, num_layers, on, fields, id=name
  )


def _stack(make, stages, microbatches, num_layers, *, tied=False, **fields):
  made = make(num_stages=stages, num_microbatches=microbatches)
  return scheduled_stack.ScheduledStack(
    (_block(tied=tied),),
    num_layers,
    num_stages=stages,
    num_microbatches=microbatches,
    circular_repeats=made.pieces.num_chunks,
    schedule=make,
    **fields,
  )


def _gradient_fn(own, specs):
  return scheduled_gradients.make_gradient_fn(
    Model(own), loss_fn_of=_loss_fn, metric_fns=(_nll,), specs=specs
  )


def _run(own, values, specs, on):
  """Runs a schedule on a mesh, with the rules of the layout."""
  made = layout.Layout(
    mesh.make_mesh(
      mesh.MeshSpec.parse(on), devices=jax.devices()[: _devices(on)]
    ),
    stage_rules.with_stages(
      rules_lib.DEFAULT_RULES,
      num_stages=own.num_stages,
      num_groups=own.num_layers,
      circular_repeats=own.circular_repeats,
    ),
  )
  placed = jax.device_put(values, made.shardings(specs))
  batch = {
    name: jax.device_put(x, made.batch_sharding(x.ndim))
    for name, x in _batch().items()
  }
  run = made.jit(_of_values(_gradient_fn(own, specs), specs))
  return run(placed, batch)


def _devices(on):
  return int(np.prod([int(part.split("=")[1]) for part in on.split(",")]))


@pytest.mark.parametrize(
  ("make", "stages", "microbatches", "num_layers", "on", "fields"),
  [
    _case(one_f_one_b.two_slots, 1, 2, 4, "stage=1"),
    _case(
      one_f_one_b.two_slots,
      2,
      4,
      4,
      "stage=2,data=2,tensor=2",
      tied=True,
      residuals=SAVE,
    ),
    # Five layers on four stages, of two layers each.
    _case(gpipe.make, 4, 4, 5, "stage=4,data=2", tied=True),
    _case(interleaved.two_slots, 2, 4, 5, "stage=2,fsdp=2,tensor=2"),
    _case(zero_bubble.make_h1, 4, 4, 5, "stage=4,tensor=2", residuals=SAVE),
    _case(zero_bubble.make_v, 2, 4, 4, "stage=2", tied=True, residuals=SAVE),
  ],
)
def test_a_step_is_that_of_an_accumulating_learner(
  make, stages, microbatches, num_layers, on, fields
):
  values, specs, want = _sequential(
    num_layers, microbatches, fields.get("tied", False)
  )
  own = _stack(make, stages, microbatches, num_layers, **fields)
  got = _run(own, values, specs, on)
  assert jax.tree.structure(got) == jax.tree.structure(want)
  assert jax.tree.leaves(got[1])

  def check(path, a, b):
    scale = np.max(np.abs(b))
    assert np.max(np.abs(a - b)) <= 1e-5 * scale, jax.tree_util.keystr(path)

  jax.tree.map_with_path(check, got, want)


def _table_of_two(*, num_stages, num_microbatches):
  del num_microbatches
  return gpipe.make(num_stages=num_stages, num_microbatches=2)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    pytest.param(
      {"streaming": True, "num_microbatches": 2},
      r"streaming must be False",
      id="streaming",
    ),
    pytest.param(
      {"schedule": interleaved.two_slots, "num_microbatches": 2},
      r"circular_repeats is 1, and the table of schedule 'interleaved two-slot,"
      r" 2 chunks' has 2 chunks on each stage; they must agree",
      id="chunks",
    ),
    pytest.param(
      {"schedule": zero_bubble.make_h1, "num_microbatches": 1},
      r"at least 2, got 1",
      id="few",
    ),
    pytest.param(
      {"schedule": _table_of_two, "num_microbatches": 4},
      r"num_microbatches is 4, and the table of schedule 'GPipe' has 2 micro",
      id="other-table",
    ),
    pytest.param(
      {"blocks": 2, "num_layers": 5, "num_microbatches": 2},
      r"num_layers \(5\) must be a multiple of its 2 blocks: 1 layers",
      id="rest",
    ),
  ],
)
def test_refuses_stacks_that_do_not_fit(fields, message):
  blocks = (_block(tied=False),) * fields.pop("blocks", 1)
  given = {"num_layers": 4, "num_stages": 2, **fields}
  with pytest.raises(ValueError, match=message):
    scheduled_stack.ScheduledStack(blocks, **given)


def test_refuses_variables_that_microbatches_cannot_combine():
  def spec(**fields):
    made = variables.VariableSpec(
      name="statistics/mean",
      shape=(1,),
      dtype=np.dtype("float32"),
      axes=(None,),
      **fields,
    )
    return {"statistics": {"mean": made}}

  rule, combine = variables.UpdateRule, variables.CombineRule
  own = _stack(gpipe.make, 2, 2, 2)
  for fields, message in (
    ({"update": rule.REPLACE}, r"statistics/mean is replaced by the forward"),
    (
      {"update": rule.OVERWRITE_WITH_GRADIENT, "combine": combine.MEAN},
      r"is overwritten with its gradient and combined by MEAN",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      _gradient_fn(own, spec(**fields))


def test_refuses_arguments_with_gradients():
  class Wrong(Model):
    @nn.compact
    def loss(self, batch, *, deterministic=False):
      """Gives layers the table's numbers."""
      table = self.param("table", nn.initializers.ones, (VOCAB, EMBED))
      x = table[batch["ids"]]
      x = self.stack(x, x, deterministic=deterministic)
      return (jnp.sum(x), jnp.float32(1)), {}, {}

  own = _stack(gpipe.make, 2, 2, 2)
  values, specs, _ = _sequential(4, 4, False)
  run = scheduled_gradients.make_gradient_fn(
    Wrong(own), loss_fn_of=_loss_fn, metric_fns=(), specs=specs
  )
  with pytest.raises(ValueError, match=r"args/0 of dtype float32: with a sche"):
    jax.eval_shape(_of_values(run, specs), values, _batch())


def test_names_are_those_of_tables():
  made = {
    name: make(num_stages=2, num_microbatches=4).name
    for name, make in by_name.NAMES.items()
  }
  assert made["zb_h1"] == "ZB-H1"
  assert len(set(made.values())) == len(made)
  assert by_name.find("1f1b") is one_f_one_b.make
  with pytest.raises(
    ValueError, match=r"no schedule '1f1b_two_slot'; .*mean '1f1b_two_slots'"
  ):
    by_name.find("1f1b_two_slot")
