"""Tests for what layers keep in a pipeline: what microbatches in turns keep."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import remat, summaries
from paxon.layers import testing as layers_testing
from paxon.layers.losses import auxiliary_loss
from paxon.layers.models import testing as models_testing
from paxon.layers.stacks import stack
from paxon.pipeline import spmd_pipeline, stage_sharding, testing
from paxon.sharding import layout, mesh, variables
from paxon.sharding import rules as rules_lib

BATCH, EMBED, LAYERS, MICROBATCHES = 8, 4, 5, 4
_Rule = variables.CombineRule
_Update = variables.UpdateRule


class Stateful(auxiliary_loss.Source, nn.Module):
  """A layer with every kind of state."""

  def _statistic(self, name, combine):
    init = variables.make_boxed_init(
      nn.initializers.ones,
      (None,),
      shape=(1,),
      dtype=np.float32,
      combine=combine,
    )
    return self.variable("statistics", name, init)

  @nn.compact
  def __call__(self, x):
    """Returns `x` and a branch."""
    scale = self.variable(
      "scales",
      "scale",
      variables.make_boxed_init(
        nn.initializers.ones,
        (None,),
        shape=(1,),
        dtype=np.float32,
        update=_Update.OVERWRITE_WITH_GRADIENT,
        combine=_Rule.MAX,
      ),
    )
    # Of zeros, which bubbles begin with, this is NaN.
    x = x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    y = jnp.tanh(
      nn.Dense(EMBED, name="dense")(testing.record_scale(x, scale.value))
    )
    for name, rule in (("mean", _Rule.MEAN), ("sum", _Rule.SUM)):
      kept = self._statistic(name, rule)
      if not self.is_initializing():
        kept.value = kept.value + jnp.mean(y)
    largest = self._statistic("largest", _Rule.MAX)
    if not self.is_initializing():
      largest.value = jnp.maximum(largest.value, jnp.max(10 * y))
      self.sow("records", "row", jnp.sum(y, axis=-1))
    auxiliary_loss.add(self, "size", jnp.mean(y * y))
    factors = auxiliary_loss.Product(
      left=jnp.mean(y, axis=0), right=jnp.mean(y * y, axis=0)
    )
    auxiliary_loss.add(self, "pair", factors)
    summaries.summarize(self, "rms", jnp.sqrt(jnp.mean(y * y)))
    return x + y


_MUTABLE = ["statistics", "records", "auxiliary_losses", "summaries"]


def _total(module, times):
  def loss(params, scales, statistics, x):
    y, new = module.apply(
      {"params": params, "scales": scales, "statistics": statistics},
      x,
      mutable=_MUTABLE,
    )
    auxiliary = sum(map(jnp.sum, jax.tree.leaves(new["auxiliary_losses"])))
    return jnp.sum(y**3) + times * auxiliary, (y, new)

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def _of_layers(new):
  own = new["layers"]["blocks_0"]
  return jax.tree.map(np.asarray, own)


@pytest.fixture(name="runs", scope="module")
def _runs():
  """A pipeline's pass of a batch, and a stack's of one microbatch each."""
  plain = stack.Stack([Stateful()], num_layers=LAYERS)
  x = layers_testing.normal(BATCH, EMBED)
  values = layers_testing.random_values(plain, x)
  args = (values["params"], values["scales"], values["statistics"])
  pipelined = spmd_pipeline.PipelinedStack(
    [Stateful()],
    num_layers=LAYERS,
    num_stages=2,
    num_microbatches=MICROBATCHES,
    circular_repeats=2,
    remat_policy=remat.save_nothing,
  )
  # What each adds to the loss is a mean over tokens.
  actual = _total(pipelined, MICROBATCHES)(*args, x)
  one = _total(plain, 1)
  expected = [one(*args, x[m::MICROBATCHES]) for m in range(MICROBATCHES)]
  return values, actual, expected


def _stacked(expected, pick):
  return np.stack([np.asarray(pick(e)) for e in expected])


def test_rows_are_those_of_microbatches_in_turns(runs):
  _, ((_, (y, _)), _), expected = runs
  rows = _stacked(expected, lambda e: e[0][1][0])
  np.testing.assert_allclose(
    y, np.swapaxes(rows, 0, 1).reshape(y.shape), rtol=1e-6, atol=1e-6
  )


def test_gradients_are_sums_over_microbatches(runs):
  _, ((loss, _), (params, _)), expected = runs
  np.testing.assert_allclose(
    loss, sum(float(e[0][0]) for e in expected), rtol=1e-5
  )
  for i, leaf in enumerate(jax.tree.leaves(params)):
    own = _stacked(expected, lambda e: jax.tree.leaves(e[1][0])[i])  # noqa: B023
    np.testing.assert_allclose(leaf, own.sum(0), rtol=1e-4, atol=1e-5)


def test_overwritten_variables_are_combined_by_maximum(runs):
  """Sums of amax histories made fp8 diverge (google/praxis issue 44)."""
  _, (_, (_, scales)), expected = runs
  own = _stacked(expected, lambda e: jax.tree.leaves(e[1][1])[0])
  (actual,) = jax.tree.leaves(scales)
  assert actual.shape == (LAYERS, 1)
  np.testing.assert_allclose(actual, own.max(0), rtol=1e-5)
  assert np.all(actual < 0.999 * own.sum(0))


def test_statistics_are_combined_by_their_rules(runs):
  values, ((_, (_, new)), _), expected = runs
  actual = _of_layers(new["statistics"])
  old = _of_layers(values["statistics"])
  own = [_of_layers(e[0][1][1]["statistics"]) for e in expected]
  own = jax.tree.map(lambda *x: np.stack(x), *own)
  wanted = {
    "mean": own["mean"].mean(0),
    "sum": old["sum"] + (own["sum"] - old["sum"]).sum(0),
    "largest": own["largest"].max(0),
  }
  for name, value in wanted.items():
    np.testing.assert_allclose(actual[name], value, rtol=1e-5, err_msg=name)


def test_records_are_one_for_each_layer(runs):
  """Summaries are unpacked by layer as those of a stack are (E38)."""
  _, ((_, (_, new)), _), expected = runs
  for collection, name in (("summaries", "rms"), ("auxiliary_losses", "size")):
    (actual,) = _of_layers(new[collection])[name]
    own = _stacked(
      expected,
      lambda e: _of_layers(e[0][1][1][collection])[name][0],  # noqa: B023
    )
    assert actual.shape == (LAYERS,)
    np.testing.assert_allclose(actual, own.mean(0), rtol=1e-5)
  (actual,) = _of_layers(new["auxiliary_losses"])["pair"]
  own = [_of_layers(e[0][1][1]["auxiliary_losses"])["pair"] for e in expected]
  for name, factor in actual.items():
    each = np.stack([factors[name] for (factors,) in own])
    np.testing.assert_allclose(factor, each.mean(0), rtol=1e-5, err_msg=name)
  (rows,) = _of_layers(new["records"])["row"]
  own = _stacked(
    expected, lambda e: _of_layers(e[0][1][1]["records"])["row"][0]
  )
  # [M,L,rows] to [L,rows,M], the order of the batch.
  np.testing.assert_allclose(
    rows, np.moveaxis(own, 0, 2).reshape(LAYERS, BATCH), rtol=1e-4, atol=1e-5
  )


class Noisy(nn.Module):
  """A layer with dropout, in a field and of its own."""

  dropout: nn.Module

  @nn.compact
  def __call__(self, x):
    """Returns `x` and a branch with dropout."""
    y = self.dropout(x, deterministic=False)
    noise = jax.random.normal(self.make_rng("dropout"), x.shape)
    return x + nn.Dropout(0.5)(y + noise, deterministic=False)


def _noise(x, key, *, stages, microbatches, **fields):
  pipelined = spmd_pipeline.PipelinedStack(
    [Noisy(nn.Dropout(0.5))],
    num_layers=4,
    num_stages=stages,
    num_microbatches=microbatches,
    **fields,
  )
  return jax.jit(lambda x, key: pipelined.apply({}, x, rngs={"dropout": key}))(
    x, key
  )


def test_dropout_depends_on_layer_and_microbatch_only():
  x, key = jnp.ones((BATCH, EMBED)), jax.random.key(5)
  one_by_one = [
    _noise(x[m::2], jax.random.fold_in(key, m), stages=1, microbatches=1)
    for m in range(2)
  ]
  expected = np.stack(one_by_one, axis=1).reshape(x.shape)
  for fields in (
    {},
    {"circular_repeats": 2},
    {"remat_policy": remat.save_nothing},
  ):
    actual = _noise(x, key, stages=2, microbatches=2, **fields)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
  # Each microbatch has keys of its own.
  assert len(np.unique(expected)) > 0.9 * expected.size


class Recording(nn.Module):
  """Sows an array that cannot be merged over microbatches."""

  value: str

  @nn.compact
  def __call__(self, x):
    """Returns `x`."""
    made = {"count": jnp.int32(1), "matrix": jnp.ones((3, 3))}[self.value]
    self.sow("records", self.value, made)
    return x


@pytest.mark.parametrize(
  ("value", "message"),
  [
    ("count", r"sowed records/blocks_0/count, a number of dtype int32"),
    ("matrix", r"matrix of shape \(3, 3\) from a microbatch of 2 sequences"),
  ],
)
def test_rejects_sown_arrays_that_cannot_be_merged(value, message):
  pipelined = spmd_pipeline.PipelinedStack(
    [Recording(value)], num_layers=2, num_stages=2, num_microbatches=4
  )
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(
      lambda x: pipelined.apply({}, x, mutable=["records"]),
      layers_testing.normal(BATCH, EMBED),
    )


def _decode(model, values, inputs):
  """Logits of a prefill and two steps, and the cache after them.

  The first row's prompt has three tokens, those of the others four.
  """
  batch, length = inputs.shape
  segments = layers_testing.ones(batch, length).at[0, 3].set(0)
  first = jnp.arange(batch, dtype=jnp.int32)[:, None] == 0
  positions = layers_testing.make_positions(batch, length)
  positions -= (first & (positions > 3)).astype(jnp.int32)
  given = (inputs, positions, segments)
  apply = functools.partial(model.apply, mutable=["cache"])
  prefill = functools.partial(apply, cache_length=length, method="prefill")
  logits, cache = jax.jit(prefill)(values, *(x[:, :4] for x in given))
  found = [logits]
  step = jax.jit(functools.partial(apply, method="decode_step"))
  for i in range(4, length):
    token = (x[:, i : i + 1] for x in given)
    logits, cache = step({**values, **cache}, *token)
    found.append(logits)
  return found, cache


def _decoder(*, slides):
  """A model of layers in turns of two kinds, or all with a sliding window."""
  if not slides:
    return models_testing.tiny_decoder(num_layers=6)
  made = models_testing.tiny_decoder(num_layers=7)
  window = made.stack.blocks[0]
  assert window.attention.mask.window == 3
  return made.clone(stack=stack.Stack([window], num_layers=7))


def _pipelined(plain, **fields):
  own = plain.stack
  return plain.clone(
    stack=spmd_pipeline.PipelinedStack(own.blocks, own.num_layers, **fields)
  )


def _prompts(rows):
  # Logits of other prompts can move by more than the tests' bound, 1e-5, when
  # the values are rounded: 1.7e-5 with seed 0 (in float64), 2.5e-6 with this.
  rng = np.random.default_rng(5)
  return layers_testing.array(
    rng.integers(0, models_testing.VOCAB, (rows, 6)), np.int32
  )


def _values(model, inputs):
  positions = layers_testing.make_positions(*inputs.shape)
  segments = layers_testing.ones(*inputs.shape)
  return layers_testing.random_values(model, inputs, positions, segments)


@functools.cache
def _decoded(*, slides):
  """The values, and what a plain stack makes of them."""
  plain, inputs = _decoder(slides=slides), _prompts(6)
  values = _values(plain, inputs)
  return values, inputs, _decode(plain, values, inputs)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("slides", "fields"),
  [
    # Four microbatches of six rows there are not: three are.
    (False, {"num_stages": 3, "num_microbatches": 4}),
    (False, {"num_stages": 3, "microbatch_size": 2, "streaming": True}),
    # Seven layers in four runs of two, the last of which is half empty.
    (True, {"num_stages": 2, "num_microbatches": 2, "circular_repeats": 2}),
  ],
)
def test_decodes_as_a_stack_does(slides, fields):
  """Praxis's pipelines raise here."""
  values, inputs, expected = _decoded(slides=slides)
  pipelined = _pipelined(_decoder(slides=slides), **fields)
  actual = _decode(pipelined, values, inputs)
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  ("rows", "on", "fields"),
  [
    pytest.param(
      6, "", {"microbatch_size": 8, "streaming": True}, id="one-microbatch"
    ),
    # Four microbatches would have two rows each, for four shards.
    pytest.param(8, "stage=2,data=4", {"num_microbatches": 4}, id="shards"),
    pytest.param(
      8,
      "stage=2,data=4",
      {"microbatch_size": 4, "streaming": True},
      id="streams",
    ),
  ],
)
def test_decodes_batches_that_do_not_fit(rows, on, fields):
  plain, inputs = _decoder(slides=False), _prompts(rows)
  run = functools.partial(_decode, _pipelined(plain, num_stages=2, **fields))
  values = _values(plain, inputs)
  if on:
    made = layout.Layout(
      mesh.make_mesh(mesh.MeshSpec.parse(on)),
      stage_sharding.with_stages(
        rules_lib.DEFAULT_RULES, num_stages=2, num_groups=3
      ),
    )
    actual = made.jit(run).trace(values, inputs).out_info
  else:
    actual = jax.eval_shape(run, values, inputs)
  expected = jax.eval_shape(functools.partial(_decode, plain), values, inputs)
  shapes = [[x.shape for x in jax.tree.leaves(t)] for t in (actual, expected)]
  assert shapes[0] == shapes[1]
