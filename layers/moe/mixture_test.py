"""Tests of the mixture layer, its routers by choice, and their balance."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, token_context
from paxon.layers.losses import auxiliary_loss
from paxon.layers.moe import (
  balance,
  dispatch,
  experts,
  mixture,
  routers,
  testing,
)
from paxon.layers.norms import rms_norm
from paxon.layers.stacks import block, shared, stack

B, T, D, F, E = 3, 5, 4, 3, 6
_SEGMENTS = np.array([[1, 1, 1, 1, 1], [1, 1, 2, 2, 0], [1, 1, 0, 0, 0]])


def _layer(router=None, **fields):
  return mixture.MixtureOfExperts(
    num_experts=E,
    router=router or routers.TopK(k=2),
    experts=experts.GatedExperts(mlp_dim=F),
    **fields,
  )


def _x(seed=0):
  return jax.random.normal(jax.random.key(seed), (B, T, D))


@functools.cache
def _init(layer):
  variables = jax.jit(layer.init)(jax.random.key(1), _x())
  return jax.tree.map(lambda x: x, nn.unbox(variables))


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(
  ("router", "score", "weigh"),
  [
    pytest.param(
      routers.TopK(k=2),
      testing.softmax,
      lambda w: w / w.sum(-1, keepdims=True),
      id="softmax",
    ),
    pytest.param(
      routers.TopK(k=1, normalize=False),
      testing.softmax,
      lambda w: w,
      id="switch",
    ),
    pytest.param(
      routers.TopK(k=3, score=jax.nn.sigmoid, epsilon=1e-20, scale=2.5),
      _sigmoid,
      lambda w: 2.5 * w / w.sum(-1, keepdims=True),
      id="sigmoid",
    ),
  ],
)
def test_layer_matches_numpy(router, score, weigh):
  layer = _layer(router)
  variables = _init(layer)
  params = variables["params"]
  x = np.asarray(_x(), np.float64)
  kernel = np.asarray(params["router"]["logits"]["kernel"], np.float64)
  scores = score(x @ kernel)
  ids = np.argsort(-scores, -1)[..., : router.k]
  weights = weigh(np.take_along_axis(scores, ids, -1))
  weights *= (_SEGMENTS != 0)[..., None]
  expected = testing.mix(
    x.reshape(B * T, -1),
    ids.reshape(B * T, -1),
    weights.reshape(B * T, -1),
    params["experts"],
    lambda gate, up: testing.silu(gate) * up,
  ).reshape(B, T, D)
  y = jax.jit(layer.apply)(variables, _x(), jnp.asarray(_SEGMENTS))
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
  assert not np.any(np.asarray(y)[_SEGMENTS == 0])


def test_padding_changes_nothing():
  layer = _layer(losses=(balance.switch(0.1), balance.ZLoss()))
  variables = _init(layer)
  segments = jnp.asarray(_SEGMENTS)

  @jax.jit
  def run(variables, x):
    def loss(params):
      y, new = layer.apply(
        {**variables, "params": params},
        x,
        segments,
        mutable=[auxiliary_loss.COLLECTION],
      )
      sown = jax.tree.leaves(new)
      assert len(sown) == 2
      return jnp.sum(y**2) + sum(sown), (y, new)

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])

  padding = (segments == 0)[..., None]
  one = run(variables, _x())
  other = run(variables, jnp.where(padding, jnp.nan, _x()))
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  "form", [dispatch.Dropless(), dispatch.Capacity(factor=9.0)]
)
def test_mixture_in_a_scanned_block(form):
  def model(scan):
    return stack.Stack(
      [
        block.TransformerBlock(
          attention_norm=rms_norm.RmsNorm(),
          attention=_Nothing(),
          feed_forward_norm=rms_norm.RmsNorm(),
          feed_forward=_layer(
            dispatch=form,
            losses=(balance.switch(0.1),),
            shared=feed_forward.GatedFeedForward(mlp_dim=F),
          ),
        )
      ],
      num_layers=2,
      scan=scan,
    )

  variables = nn.unbox(jax.jit(model(True).init)(jax.random.key(0), _x()))
  assert variables["params"]["layers"]["blocks_0"]["feed_forward"]["experts"][
    "gate"
  ].shape == (2, E, D, F)
  assert auxiliary_loss.COLLECTION not in variables

  def run(scan, segments):
    y, new = jax.jit(
      functools.partial(model(scan).apply, mutable=[auxiliary_loss.COLLECTION])
    )(variables, _x(), token_context.TokenContext(segment_ids=segments))
    return y, sum(map(jnp.sum, jax.tree.leaves(new)))

  scanned = run(True, jnp.asarray(_SEGMENTS))
  unrolled = run(False, jnp.asarray(_SEGMENTS))
  np.testing.assert_allclose(scanned[0], unrolled[0], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(scanned[1], unrolled[1], rtol=1e-5)
  # The block passes segments on: padding is only the residual stream.
  np.testing.assert_array_equal(
    np.asarray(scanned[0])[_SEGMENTS == 0], np.asarray(_x())[_SEGMENTS == 0]
  )


class _Nothing(nn.Module):
  """An attention layer that adds nothing."""

  def __call__(self, x, context):
    return jnp.zeros_like(x)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_shared_expert_has_dropout_in_training(is_tied):
  expert = feed_forward.GatedFeedForward(mlp_dim=F, dropout=nn.Dropout(0.5))
  made = shared.shared("expert", expert) if is_tied else expert
  layer, x = _layer(shared=made), _x()
  values = jax.jit(layer.init)(jax.random.key(1), x)
  evaluated = jax.jit(layer.apply)(values, x)
  trained = jax.jit(functools.partial(layer.apply, deterministic=False))(
    values, x, rngs={"dropout": jax.random.key(2)}
  )
  assert not np.allclose(evaluated, trained)


def test_load_of_fewer_tokens_than_experts_is_relative_to_the_mean():
  layer = mixture.MixtureOfExperts(
    num_experts=8,
    router=routers.TopK(k=1, normalize=False),
    experts=experts.GatedExperts(4, activation=nn.silu),
    summarize_loads=True,
  )
  x = jnp.ones((1, 2, 3))
  variables = jax.jit(layer.init)(jax.random.key(0), x)
  apply = jax.jit(functools.partial(layer.apply, mutable=["summaries"]))
  _, state = apply(variables, x)
  loads = [np.asarray(state["summaries"][f"load_{e}"][0]) for e in range(8)]
  np.testing.assert_allclose(np.sort(loads), [0.0] * 7 + [8.0])
  (found,) = [
    value
    for path, value in jax.tree_util.tree_leaves_with_path(state)
    if "load_max" in jax.tree_util.keystr(path)
  ]
  # Both tokens are alike: one expert of eight has all.
  np.testing.assert_allclose(found, 8.0)


def test_a_fixed_bias_selects_and_has_no_gradient():
  layer = _layer(routers.TopK(k=1, normalize=False, bias=balance.FixedBias()))
  variables = jax.tree.map(lambda x: x, _init(layer))
  router = variables["params"]["router"]
  np.testing.assert_array_equal(router["selection_bias"], np.zeros(E))
  # Scores are below 1, so all tokens choose expert 4.
  router["selection_bias"] = jnp.zeros(E).at[4].set(2.0)

  def total(params):
    routing = layer.apply(
      {"params": params},
      _x(),
      jnp.ones((B, T), jnp.bool_),
      num_experts=E,
      method=lambda module, *args, **kwargs: module.router(*args, **kwargs),
    )
    return jnp.sum(routing.weights), routing

  (_, routing), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(
    variables["params"]
  )
  np.testing.assert_array_equal(routing.ids, np.full((B, T, 1), 4))
  scores = testing.softmax(
    np.einsum("btd,de->bte", _x(), router["logits"]["kernel"])
  )
  # The bias is no part of the weights.
  np.testing.assert_allclose(routing.weights[..., 0], scores[..., 4], rtol=1e-5)
  gradient = gradients["router"]
  np.testing.assert_array_equal(gradient["selection_bias"], np.zeros(E))
  assert np.abs(gradient["logits"]["kernel"]).max() > 0


@pytest.mark.parametrize("shape", [(0, T, D), (B, 0, D)])
def test_no_tokens_are_an_error(shape):
  with pytest.raises(ValueError, match=r"needs tokens .* empty shape \("):
    _layer().init(jax.random.key(0), jnp.zeros(shape))


def test_experts_start_as_dense_layers():
  """Fan-in is that of one expert, so kernels have a dense layer's variance."""
  x = jnp.zeros((1, 1, 96))
  dense = feed_forward.GatedFeedForward(160)
  expected = nn.unbox(jax.jit(dense.init)(jax.random.key(0), x))["params"]
  init = functools.partial(experts.GatedExperts(160).init, num_experts=8)
  stacks = jax.jit(init)(jax.random.key(0), x)
  for name, kernels in nn.unbox(stacks)["params"].items():
    found = np.var(np.asarray(kernels, np.float64), axis=(1, 2))
    fan_in = 160 if name == "down" else 96
    np.testing.assert_allclose(found, 1 / fan_in, rtol=0.05)
    np.testing.assert_allclose(np.var(expected[name]), 1 / fan_in, rtol=0.05)
