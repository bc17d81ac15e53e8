"""Tests of mixtures in a train step: microbatches, remat, balance, layers."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.layers import embedding, feed_forward, remat
from paxon.layers.attention import grouped_query
from paxon.layers.models import pre_norm_decoder
from paxon.layers.moe import balance, experts, mixture, routers
from paxon.layers.norms import rms_norm
from paxon.learners import learner, train_state, train_step
from paxon.learners.optimizers import sgd
from paxon.runner.session import model_loss
from paxon.sharding import variables

B, T, V, D, E = 8, 6, 11, 8, 4


def _model(**stack):
  return pre_norm_decoder.compose(
    pre_norm_decoder.build,
    embedding=embedding.Embedding(vocab_size=V, embed_dim=D),
    norm=rms_norm.RmsNorm,
    attention=grouped_query.GroupedQueryAttention(
      2, num_kv_heads=1, head_dim=4
    ),
    feed_forward=mixture.MixtureOfExperts(
      num_experts=E,
      router=routers.TopK(
        k=2,
        score=jax.nn.sigmoid,
        bias=balance.SelectionBias(rate=0.125),
      ),
      experts=experts.GatedExperts(mlp_dim=4),
      losses=(balance.ZLoss(),),
      shared=feed_forward.GatedFeedForward(mlp_dim=4),
    ),
    num_layers=2,
    **stack,
  )


def _batch():
  rng = np.random.default_rng(0)
  ids = rng.integers(0, V, (B, T))
  segments = np.ones((B, T), np.int32)
  segments[0, 3:] = segments[5, 1:] = 0
  return {
    "inputs": jnp.asarray(ids, jnp.int32),
    "targets": jnp.asarray(np.roll(ids, -1, 1), jnp.int32),
    "weights": jnp.asarray(segments, jnp.float32),
    "segment_ids": jnp.asarray(segments),
    "positions": jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T)),
  }


@functools.cache
def _trained(num_microbatches=1, scan=True, remat_policy=None):
  model = _model(scan=scan, remat_policy=remat_policy)
  batch = _batch()
  specs = variables.get_specs(model_loss.abstract_variables(model, batch))
  setup = learner.Learner(
    optimizer=sgd.Sgd(schedule=optax.constant_schedule(0.5)),
    num_microbatches=num_microbatches,
  )
  loss_fn = model_loss.make_loss_fn(model, specs=specs, deterministic=False)
  step = jax.jit(
    train_step.make_train_step(
      loss_fn, learner=setup, specs=specs, seed=0, streams=("routing",)
    )
  )
  values = nn.unbox(model_loss.init(_model(), batch))
  state = train_state.make_initial(
    variables.unbox(values), learner=setup, specs=specs
  )
  states = []
  for _ in range(3):
    state, metrics = step(state, batch)
    states.append((state.variables, metrics))
  return states


@pytest.mark.nightly
def test_bias_follows_the_counts():
  before = np.zeros((2, E))
  seen = np.zeros((2, E))
  for values, metrics in _trained():
    layers = values["balance"]["stack"]["layers"]
    bias = layers["blocks_0"]["feed_forward"]["router"]
    np.testing.assert_array_equal(bias["bias"], before)
    np.testing.assert_array_equal(bias["seen"], seen)
    last = np.asarray(bias["count"], np.float64) - seen
    # Two choices of each token that is not padding.
    np.testing.assert_array_equal(last.sum(-1), 2 * (B * T - 8))
    before += 0.125 * np.sign(last.mean(-1, keepdims=True) - last)
    seen = np.asarray(bias["count"], np.float64)
    assert [name for name in metrics if name.endswith("feed_forward/load_max")]
  assert before.any()


@pytest.mark.nightly
@pytest.mark.parametrize(
  "fields",
  [
    {"num_microbatches": 4},
    {"scan": False},
    {"remat_policy": remat.save_nothing},
  ],
  ids=str,
)
def test_the_same_steps(fields):
  values, _ = _trained()[-1]
  other, _ = _trained(**fields)[-1]
  jax.tree.map(
    np.testing.assert_array_equal, other["balance"], values["balance"]
  )
  if "num_microbatches" in fields:
    # The mean of the z-loss is over each microbatch.
    return
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    other["params"],
    values["params"],
  )
