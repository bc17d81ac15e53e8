"""Clipped gradients of models: ghost norms, meshes and microbatches.

The reference differentiates the loss of each example alone, unrolled, in a
Python loop, with layers that know nothing about ghost norms.
"""

import dataclasses
import functools

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import (
  embedding,
  feed_forward,
  ghost_norms,
  linear,
  unembedding,
)
from paxon.layers.attention import grouped_query, projections
from paxon.layers.losses import softmax_loss
from paxon.layers.models import classifier, decoder_lm
from paxon.layers.norms import layer_norm
from paxon.layers.stacks import block, stack
from paxon.learners import (
  gradients,
  privacy,
  private_gradients,
  train_state,
  variable_groups,
)
from paxon.runner.session import model_loss
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes
from paxon.sharding import variables

VOCAB, LENGTH = 16, 8
LOSS = softmax_loss.SoftmaxLoss(chunk_length=None, z_loss_weight=1e-2)


def _lm(einsum, lookup, *, tied=False, gated=True, combined=False, **fields):
  """Returns a decoder with biases and norms, and 3 scanned layers."""
  feed = (
    feed_forward.GatedFeedForward(24, use_bias=True, einsum=einsum())
    if gated
    else feed_forward.FeedForward(24, einsum=einsum())
  )
  kinds = projections.CombinedProjections, projections.SeparateProjections
  attention = grouped_query.GroupedQueryAttention(
    4,
    num_kv_heads=4 if combined else 2,
    head_dim=4,
    projections=kinds[not combined](use_bias=True),
    einsum=einsum(),
  )
  layer = block.TransformerBlock(
    attention_norm=layer_norm.LayerNorm(),
    attention=attention,
    feed_forward_norm=layer_norm.LayerNorm(),
    feed_forward=feed,
  )
  head = None
  if not tied:
    head = unembedding.Unembedding(VOCAB, use_bias=True, einsum=einsum())
  return decoder_lm.DecoderLm(
    embedding=embedding.Embedding(
      VOCAB, embed_dim=16, lookup=lookup, einsum=einsum()
    ),
    stack=stack.Stack((layer,), num_layers=3, **fields),
    final_norm=layer_norm.LayerNorm(),
    head=head,
    token_loss=LOSS,
  )


class _Features(nn.Module):
  """A multilayer perceptron of features, called as encoders are."""

  inner: nn.Module

  def __call__(self, x, *, deterministic):
    del deterministic
    return self.inner(x)


def _mlp(einsum, lookup):
  del lookup
  layer = linear.Linear(24, activation=nn.relu, einsum=einsum())
  return classifier.Classifier(
    _Features(layer),
    linear.Linear(VOCAB, einsum=einsum()),
    input_keys=("inputs",),
  )


MODELS = {
  "gated": _lm,
  "plain": functools.partial(_lm, gated=False),
  "combined projections": functools.partial(_lm, combined=True),
  "unrolled": functools.partial(_lm, scan=False),
  "linear": _mlp,
}


def _make(name, *, is_ghost):
  if is_ghost:
    return MODELS[name](ghost_norms.GhostEinsum, ghost_norms.GhostLookup())
  return MODELS[name](lambda: jnp.einsum, embedding.gather)


def _batch(name, size=8):
  random = np.random.default_rng(0)
  if name == "linear":
    return {
      "inputs": jnp.asarray(random.normal(size=(size, 10)), jnp.float32),
      "labels": jnp.asarray(random.integers(VOCAB, size=size), jnp.int32),
      "example_weights": jnp.ones(size, jnp.float32),
    }
  ids = random.integers(VOCAB, size=(size, LENGTH + 1))
  weights = np.ones((size, LENGTH), np.float32)
  # Examples of several lengths, one of them empty.
  weights[1, 5:], weights[2] = 0, 0
  return {
    "inputs": jnp.asarray(ids[:, :-1], jnp.int32),
    "targets": jnp.asarray(ids[:, 1:], jnp.int32),
    "weights": jnp.asarray(weights),
    "positions": jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (size, 1)),
    "segment_ids": jnp.ones((size, LENGTH), jnp.int32),
  }


def _prepare(model, batch):
  specs = variables.get_specs(model_loss.abstract_variables(model, batch))
  loss_fn = model_loss.make_loss_fn(model, specs=specs, deterministic=False)
  return specs, loss_fn


def _select(values, specs):
  groups = variable_groups.Group
  return gradients.Variables(
    params=variable_groups.select(values, groups.OPTIMIZED, specs=specs),
    overwritten=variable_groups.select(values, groups.OVERWRITTEN, specs=specs),
    constant=variable_groups.select(
      values, groups.REPLACED, groups.FROZEN, specs=specs
    ),
  )


@functools.cache
def _values(name, is_ghost=False):
  model, batch = _make(name, is_ghost=is_ghost), _batch(name)
  return jax.jit(lambda: variables.unbox(model_loss.init(model, batch)))()


def _rngs():
  return {
    name: train_state.make_key(1, step=0, stream=name)
    for name in ("dropout", "masking", privacy.STREAM)
  }


def _run(name, settings, *, is_ghost, num_microbatches=1, layout=None):
  model, batch = _make(name, is_ghost=is_ghost), _batch(name)
  specs, loss_fn = _prepare(model, batch)
  fn = private_gradients.make_gradient_fn(
    loss_fn,
    metric_fns=(),
    privacy=settings,
    num_microbatches=num_microbatches,
    specs=specs,
  )
  values = _values(name, is_ghost)

  def run(values, batch):
    return dataclasses.asdict(fn(_select(values, specs), batch, _rngs()))

  if layout is None:
    return jax.jit(run)(values, batch)
  shardings = layout.shardings(specs)
  values = jax.device_put(values, shardings)
  batch = {
    k: jax.device_put(x, layout.batch_sharding(x.ndim))
    for k, x in batch.items()
  }
  return layout.jit(run)(values, batch)


def _in_float64(x):
  return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


@functools.cache
def _reference(name):
  """Returns the gradient of each example [N, ...] and the norms, in float64."""
  model, batch = _make(name, is_ghost=False), _batch(name)
  _, loss_fn = _prepare(model, batch)

  def gradient(params, example):
    def loss(params):
      total, weight = loss_fn(params, example, _rngs()).loss
      return total / jnp.maximum(weight, 1)

    return jax.grad(loss)(params)

  # A loop: what is tested uses `jax.vmap`.
  @jax.jit
  def all_gradients(params, batch):
    return jax.lax.map(
      lambda example: gradient(
        params, jax.tree.map(lambda x: x[None], example)
      ),
      batch,
    )

  with jax.enable_x64(True):
    values, batch = jax.tree.map(_in_float64, (_values(name), batch))
    found = all_gradients(values, batch)
  flat = {
    k: np.asarray(x, np.float64)
    for k, x in traverse_util.flatten_dict(found).items()
  }
  squares = [np.sum(x**2, axis=tuple(range(1, x.ndim))) for x in flat.values()]
  return flat, np.sqrt(sum(squares))


def _clip(flat, norms, clip_norm):
  factors = 1 / np.maximum(1, norms / clip_norm)
  return {k: np.tensordot(factors, x, 1) / len(norms) for k, x in flat.items()}


def _assert_close(actual, expected, rtol=1e-5):
  actual = traverse_util.flatten_dict(actual)
  assert set(actual) == set(expected)
  for path, x in expected.items():
    # Where large terms cancel, float32 leaves some of their last digits.
    atol = max(1e-7, 2e-6 * np.max(np.abs(x)))
    np.testing.assert_allclose(
      actual[path], x, rtol=rtol, atol=atol, err_msg="/".join(path)
    )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("name", "is_ghost"),
  [*((name, True) for name in MODELS), ("gated", False), ("linear", False)],
)
def test_clipped_gradients_equal_those_of_single_examples(name, is_ghost):
  gradients_of, norms = _reference(name)
  # Some examples are clipped, others are not.
  clip_norm = float(np.median(norms))
  settings = privacy.Privacy(
    clip_norm=clip_norm,
    noise_multiplier=0.0,
    clipping=privacy.Clipping.GHOST
    if is_ghost
    else privacy.Clipping.PER_EXAMPLE,
    max_materialized_size=64,
  )
  result = _run(name, settings, is_ghost=is_ghost)
  _assert_close(result["params"], _clip(gradients_of, norms, clip_norm))
  total, weight = result["metrics"]["privacy/grad_norm"]
  # Ghost norms equal those of the gradients.
  np.testing.assert_allclose(total / weight, norms.mean(), rtol=1e-6)


def _ghost(clip_norm=0.5, **fields):
  given = {"noise_multiplier": 0.0, "max_materialized_size": 64} | fields
  return privacy.Privacy(
    clip_norm=clip_norm, clipping=privacy.Clipping.GHOST, **given
  )


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", "fsdp=8"])
def test_mesh_and_microbatches_change_nothing(mesh):
  settings = _ghost(noise_multiplier=1.0)
  alone = _run("gated", settings, is_ghost=True)
  layout = layouts.Layout(meshes.make_mesh(meshes.MeshSpec.parse(mesh)))
  count = 2 if "data" in mesh else 1
  sharded = _run(
    "gated", settings, is_ghost=True, num_microbatches=count, layout=layout
  )
  _assert_close(
    jax.device_get(sharded["params"]),
    traverse_util.flatten_dict(alone["params"]),
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    jax.device_get(sharded["metrics"]),
    jax.device_get(alone["metrics"]),
  )


def test_layers_without_a_ghost_norm_are_errors():
  batch = _batch("gated")
  tied = _lm(ghost_norms.GhostEinsum, ghost_norms.GhostLookup(), tied=True)
  with pytest.raises(ValueError, match=r"shape .* of the parameter 'table'"):
    _prepare(tied, batch)
  # Only the embedding has one.
  model = _lm(lambda: jnp.einsum, ghost_norms.GhostLookup())
  specs, loss_fn = _prepare(model, batch)
  with pytest.raises(ValueError, match="requires a ghost norm of params/"):
    private_gradients.make_gradient_fn(
      loss_fn,
      metric_fns=(),
      privacy=_ghost(),
      num_microbatches=1,
      specs=specs,
    )


def test_chunks_of_the_head_are_an_error():
  model = _make("gated", is_ghost=True).clone(
    token_loss=softmax_loss.SoftmaxLoss(chunk_length=4)
  )
  with pytest.raises(ValueError, match=r"set SoftmaxLoss\.chunk_length=None"):
    _prepare(model, _batch("gated"))
