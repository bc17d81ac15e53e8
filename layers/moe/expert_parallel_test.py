"""Tests of expert parallelism: sharded equals unsharded; collectives."""

import functools
import math
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.losses import auxiliary_loss
from paxon.layers.moe import (
  balance,
  dispatch,
  experts,
  mixture,
  pax_routers,
  routers,
)
from paxon.layers.moe import routing as routing_lib
from paxon.sharding import layout, mesh, rule_sets, variables

B, T, D, F, E = 8, 4, 8, 4, 8

_MESHES = {
  "data-expert": {"data": 2, "expert": 4},
  "expert": {"expert": 8},
  "expert-tensor": {"expert": 4, "tensor": 2},
  "fsdp-expert-tensor": {"fsdp": 2, "expert": 2, "tensor": 2},
  "expert-sequence": {"expert": 4, "sequence": 2},
}


def _layout(name):
  return layout.Layout(mesh.make_mesh(mesh.MeshSpec(ici=_MESHES[name])))


def _layer(bound=None, num_experts=E):
  return mixture.MixtureOfExperts(
    num_experts=num_experts,
    router=routers.TopK(k=2, logits=routers.Logits(use_bias=True)),
    experts=experts.GatedExperts(
      mlp_dim=F, use_bias=True, bias_init=nn.initializers.normal(1.0)
    ),
    dispatch=dispatch.Dropless(bound=bound),
    losses=(balance.switch(0.1), balance.ZLoss()),
  )


@functools.cache
def _boxed():
  x = jnp.zeros((B, T, D))
  return jax.jit(_layer().init)(jax.random.key(0), x)


def _variables(routing):
  values = jax.tree.map(lambda x: x, nn.unbox(_boxed()))
  logits = values["params"]["router"]["logits"]
  if routing == "all to one":
    logits["bias"] = logits["bias"].at[5].set(50.0).at[6].set(25.0)
  if routing == "ties":
    logits["kernel"] = jnp.zeros_like(logits["kernel"])
  return values


def _batch():
  x = jax.random.normal(jax.random.key(2), (B, T, D))
  segments = np.ones((B, T), np.int32)
  segments[1, 2:] = segments[6] = 0
  return x, jnp.asarray(segments)


def _step(layer):
  def loss(params, x, segments):
    y, new = layer.apply(
      {"params": params}, x, segments, mutable=[auxiliary_loss.COLLECTION]
    )
    auxiliary = sum(map(jnp.sum, jax.tree.leaves(new)))
    return jnp.sum(jnp.sin(y)) + auxiliary, (y, auxiliary)

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


@functools.cache
def _expected(routing):
  params = _variables(routing)["params"]
  return jax.jit(_step(_layer()))(params, *_batch())


@functools.cache
def _compiled(name, bound):
  at = _layout(name)
  specs = variables.get_specs(jax.eval_shape(_boxed.__wrapped__))["params"]
  x, segments = _batch()
  jitted = at.jit(
    _step(_layer(bound)),
    in_shardings=(
      at.shardings(specs),
      at.batch_sharding(3),
      at.batch_sharding(2),
    ),
  )
  return jitted.lower(_variables("random")["params"], x, segments).compile()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("name", "bound"),
  [
    *((name, None) for name in _MESHES),
    ("data-expert", 1.5),
    ("fsdp-expert-tensor", 1.5),
    ("expert-tensor", 9.0),
  ],
)
def test_sharded_equals_unsharded(name, bound):
  compiled = _compiled(name, bound)
  for routing in ("random", "all to one", "ties"):
    actual = compiled(
      *jax.device_put(
        (_variables(routing)["params"], *_batch()),
        compiled.input_shardings[0],
      )
    )
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5),
      actual,
      _expected(routing),
    )


def _dense(params, x):
  """The definition: all experts multiply all tokens."""
  logits = params["router"]["logits"]
  scores = x @ logits["kernel"] + logits["bias"][None, None]
  scores = jax.nn.softmax(scores, axis=-1)
  least = jnp.sort(scores, axis=-1)[..., -2:-1]
  weights = jnp.where(scores >= least, scores, 0)
  weights /= jnp.sum(weights, -1, keepdims=True)
  e = params["experts"]
  gate, up = (
    jnp.einsum("BTD,EDF->BTEF", x, e[name]) + e[f"{name}_bias"][None, None]
    for name in ("gate", "up")
  )
  y = jnp.einsum("BTEF,EFD->BTED", jax.nn.silu(gate) * up, e["down"])
  y += e["down_bias"][None, None]
  return jnp.einsum("BTED,BTE->BTD", y, weights)


@pytest.mark.parametrize("routing", ["random", "all to one"])
def test_exchange_equals_the_definition_in_float64(routing):
  """With room for all choices, and with several rounds of the exchange."""
  with jax.enable_x64(True):
    params, (x, _) = _variables(routing)["params"], _batch()
    # No ties, and in float64.
    params, x = jax.tree.map(lambda v: v.astype(jnp.float64), (params, x))
    layer = _layer(1.5)

    def loss(apply):
      return lambda params, x: jnp.sum(jnp.sin(apply(params, x)))

    actual = _layout("data-expert").jit(
      jax.grad(
        loss(lambda params, x: layer.apply({"params": params}, x)), (0, 1)
      )
    )(params, x)
    expected = jax.jit(jax.grad(loss(_dense), (0, 1)))(params, x)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11),
      actual,
      expected,
    )


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_an_exchange_has_no_buffers_for_the_worst_case(is_recomputed):
  """The fallback allocates nothing, nor do the values that it would save."""
  tokens, k, rows = 512, 4, 8 * 512 * 2
  at = _layout("expert")
  temporaries = {}
  for bound in (None, 1.5):
    layer = mixture.MixtureOfExperts(
      num_experts=16,
      router=routers.TopK(k=k),
      experts=experts.GatedExperts(mlp_dim=24),
      dispatch=dispatch.Dropless(bound=bound),
    )
    x = jax.ShapeDtypeStruct((8, tokens, 40), jnp.float32)
    boxed = jax.eval_shape(layer.init, jax.random.key(0), x)
    specs = variables.get_specs(boxed)["params"]

    def apply(params, x, layer=layer):
      return layer.apply({"params": params}, x)

    if is_recomputed:
      apply = jax.checkpoint(apply)
    compiled = (
      at.jit(
        jax.grad(lambda p, x, f=apply: jnp.sum(jnp.sin(f(p, x))), (0, 1)),
        in_shardings=(at.shardings(specs), at.batch_sharding(3)),
      )
      .lower(nn.unbox(boxed)["params"], x)
      .compile()
    )
    # Each of 8 devices multiplies at most two choices of each token.
    is_worst = re.search(rf"f32\[{rows},(24|40)\]", compiled.as_text())
    assert bool(is_worst) == (bound is None)
    temporaries[bound] = compiled.memory_analysis().temp_size_in_bytes
  # Slots for 1.5 times the mean, where the worst case is 4 times.
  assert temporaries[1.5] < 0.6 * temporaries[None]


def _collectives(text):
  """Returns `(kind, dimensions)` of the collectives of a program."""
  kinds = "all-gather|all-to-all|reduce-scatter"
  pattern = rf"= \(?\w+\[([\d,]*)\].*? ({kinds})\("
  return [
    (kind, tuple(map(int, sizes.split(","))) if sizes else ())
    for sizes, kind in re.findall(pattern, text)
  ]


def test_collectives_of_gathering():
  found = _collectives(_compiled("data-expert", None).as_text())
  kinds = {kind for kind, _ in found}
  assert "all-gather" in kinds
  assert "all-to-all" not in kinds
  # Tokens are flat here, so these would be kernels [E,D,F] or scores [B,T,E].
  assert not [sizes for _, sizes in found if len(sizes) == 3]


@pytest.mark.parametrize("bound", [None, 9.0])
def test_collectives_of_tokens_have_the_name_that_plans_expect(bound):
  name = "expert-tensor" if bound else "data-expert"
  kinds = "all-to-all" if bound else "all-gather"
  lines = [
    line
    for line in _compiled(name, bound).as_text().splitlines()
    if re.search(rf"\[[\d,]+,{D}\]\S* {kinds}\(", line)
  ]
  assert lines
  for line in lines:
    (stack,) = re.findall(r'op_name="([^"]*)"', line)
    assert "/expert_parallel/" in stack


def test_collectives_of_exchanging():
  found = _collectives(_compiled("expert-tensor", 9.0).as_text())
  assert "all-to-all" in {kind for kind, _ in found}
  assert "all-gather" not in {kind for kind, _ in found}


def test_einsums_reduce_the_gradients_of_local_experts():
  at = layout.Layout(
    mesh.make_mesh(mesh.MeshSpec(ici={"fsdp": 2, "expert": 4}))
  )
  by_sequence = routing_lib.TokenGroups(num_groups=B)
  layer = mixture.MixtureOfExperts(
    num_experts=E,
    router=pax_routers.TopTwo(),
    experts=experts.GatedExperts(mlp_dim=24),
    dispatch=dispatch.OneHotEinsum(factor=2.0, groups=by_sequence),
  )
  x = jax.random.normal(jax.random.key(0), (B, 32, 40))
  boxed = jax.jit(layer.init)(jax.random.key(0), x)
  params, specs = nn.unbox(boxed)["params"], variables.get_specs(boxed)
  gradient = jax.grad(
    lambda p, x: jnp.sum(jnp.sin(layer.apply({"params": p}, x))), (0, 1)
  )
  shardings = at.shardings(specs["params"]), at.batch_sharding(3)
  compiled = (
    at.jit(gradient, in_shardings=shardings, out_shardings=shardings)
    .lower(params, x)
    .compile()
  )
  text = compiled.as_text()
  assert text.count(" all-to-all(") == 4
  reduced = 0
  for types in re.findall(r"= (.*?) all-reduce\(", text):
    for sizes in re.findall(r"\[(\d+,\d+,\d+)\]", types):
      reduced += 4 * math.prod(map(int, sizes.split(",")))
  # Three kernels of the two experts of a device, in float32, over fsdp.
  assert reduced == 3 * (E // 4) * 40 * 24 * 4
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    compiled(*jax.device_put((params, x), compiled.input_shardings[0])),
    jax.jit(gradient)(params, x),
  )


def test_experts_that_the_axis_does_not_divide():
  at = _layout("data-expert")
  layer, (x, segments) = _layer(num_experts=6), _batch()
  values = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), x))
  with pytest.raises(ValueError, match=r"'experts' of size 6.*expert=4"):
    at.jit(layer.apply).lower(values, x, segments)


def test_rules_that_split_the_width_of_tokens():
  at = layout.Layout(
    mesh.make_mesh(mesh.MeshSpec(ici={"fsdp": 2, "expert": 2, "tensor": 2})),
    rules=rule_sets.find_rules("weight_stationary"),
  )
  x, segments = _batch()
  layer, values = _layer(), _variables("random")
  np.testing.assert_allclose(
    at.jit(layer.apply)(values, x, segments),
    jax.jit(layer.apply)(values, x, segments),
    rtol=1e-5,
    atol=1e-6,
  )


def test_repeated_choices_of_weight_zero():
  # All tokens choose expert 0; other scores underflow, so it is chosen again.
  at = _layout("expert")
  router = pax_routers.TopTwo()
  layer = mixture.MixtureOfExperts(
    num_experts=E, router=router, experts=experts.GatedExperts(mlp_dim=F)
  )
  x, segments = _batch()
  x = jnp.abs(x) + 1
  values = nn.unbox(jax.jit(layer.init)(jax.random.key(0), x))
  logits = values["params"]["router"]["logits"]
  logits["kernel"] = jnp.zeros_like(logits["kernel"]).at[:, 0].set(1e3)
  np.testing.assert_allclose(
    at.jit(layer.apply)(values, x, segments),
    jax.jit(layer.apply)(values, x, segments),
    rtol=1e-4,
    atol=1e-5,
  )


def test_tokens_of_a_decoding_step():
  at = _layout("expert")
  x = jax.random.normal(jax.random.key(5), (1, 1, D))
  layer, values = _layer(), _variables("random")
  np.testing.assert_allclose(
    at.jit(layer.apply)(values, x),
    jax.jit(layer.apply)(values, x),
    rtol=1e-5,
    atol=1e-6,
  )
