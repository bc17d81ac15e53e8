"""Quantized experts compared with the definition in float64."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.moe import dispatch, experts, mixture, routers, testing
from paxon.quantization import einsum as einsum_lib
from paxon.quantization import lora, matmuls, recipe, recipes, served_einsum
from paxon.quantization import testing as quantization_testing
from paxon.sharding import layout, mesh

B, T, D, F, E = 8, 3, 8, 4, 4
_ALL = dispatch.Capacity(minimum=B * T)
_MESH = mesh.MeshSpec(ici={"fsdp": 2, "expert": 2, "tensor": 2})


def _layer(einsum, form=_ALL):
  return mixture.MixtureOfExperts(
    num_experts=E,
    router=routers.TopK(k=2),
    experts=experts.GatedExperts(mlp_dim=F, einsum=einsum),
    dispatch=form,
  )


def _x():
  return jax.random.normal(jax.random.key(0), (B, T, D))


@functools.cache
def _params():
  values = jax.jit(_layer(jnp.einsum).init)(jax.random.key(1), _x())
  params = nn.unbox(values)["params"]
  # Scales of experts and outputs are far apart.
  size = jnp.asarray([1.0, 10.0, 0.1, 3.0])[:, None, None]
  made = {name: w * size for name, w in params["experts"].items()}
  return {**params, "experts": made}


def _routed():
  kernel = np.asarray(_params()["router"]["logits"]["kernel"], np.float64)
  scores = testing.softmax(np.asarray(_x(), np.float64).reshape(-1, D) @ kernel)
  ids = np.argsort(-scores, -1)[:, :2]
  weights = np.take_along_axis(scores, ids, -1)
  return ids, weights / weights.sum(-1, keepdims=True)


def _stored(name):
  """Returns kernels whose outputs have one scale each, dequantized."""
  rhs = served_einsum.serving_recipe(recipes.named(name)).rhs
  return {
    key: quantization_testing.quantized(np.asarray(w), rhs, (1,))
    for key, w in _params()["experts"].items()
  }


def _expected(parameters):
  ids, weights = _routed()
  y = testing.mix(
    np.asarray(_x()).reshape(-1, D),
    ids,
    weights,
    parameters,
    lambda gate, up: testing.silu(gate) * up,
  )
  return y.reshape(B, T, D)


def _serve(name, form, *, weights_only=True):
  rules = served_einsum.serving_recipe(recipes.named(name))
  if weights_only:
    rules = recipe.Recipe(None, rules.rhs, None)
  layer = _layer(served_einsum.ServedEinsum(rules), form)
  _, made = jax.jit(
    lambda v: layer.apply(v, _x(), mutable=[served_einsum.COLLECTION])
  )({"params": _params()})
  made = nn.unbox(made)
  # The parameters are not read.
  empty = jax.tree.map(jnp.zeros_like, _params()["experts"])
  return layer, {"params": {**_params(), "experts": empty}, **made}


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_channel"])
@pytest.mark.parametrize("form", [dispatch.Dropless(), _ALL])
def test_served_experts_have_a_scale_for_each_expert_and_output(name, form):
  layer, values = _serve(name, form)
  stored = values[served_einsum.COLLECTION]["experts"]["einsum"]
  assert stored["up"]["scale"].shape == (E, 1, F)
  assert stored["down"]["scale"].shape == (E, 1, D)
  assert stored["up"]["values"].dtype.itemsize == 1
  y = jax.jit(layer.apply)(values, _x())
  expected = _expected(_stored(name))
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
  assert not np.allclose(y, _expected(_params()["experts"]), rtol=1e-3)


@pytest.mark.parametrize("bound", [None, 9.0])
def test_served_experts_on_eight_devices(bound):
  layer, values = _serve("int8", dispatch.Dropless(bound=bound))
  at = layout.Layout(mesh.make_mesh(_MESH))
  np.testing.assert_allclose(
    at.jit(layer.apply)(values, _x()),
    jax.jit(layer.apply)(values, _x()),
    rtol=1e-4,
    atol=1e-5,
  )


def test_dropless_experts_keep_the_dtype_of_activations():
  layer, values = _serve("int8", dispatch.Dropless(), weights_only=False)
  np.testing.assert_allclose(
    jax.jit(layer.apply)(values, _x()),
    _expected(_stored("int8")),
    rtol=1e-4,
    atol=1e-4,
  )


@pytest.mark.parametrize("name", ["fp8_current", "int8", "fp8_channel"])
def test_quantized_training_matches_the_definition(name):
  used = recipes.named(name)
  layer = _layer(einsum_lib.QuantizedEinsum(used))
  y = jax.jit(layer.apply)({"params": _params()}, _x())
  # Slots of each expert in order, empty ones zero, as in `dispatch.Capacity`.
  ids, weights = _routed()
  x = np.asarray(_x(), np.float64).reshape(-1, D)
  rows, scales = np.zeros((E, B * T, D)), np.zeros((E, B * T, 1))
  slots = {}
  for j in range(2):
    for t, e in enumerate(ids[:, j]):
      slots[t, j] = slot = sum(ids[u, i] == e for u, i in slots)
      rows[e, slot], scales[e, slot] = x[t], weights[t, j]
  w = _params()["experts"]

  def multiply(left, kernel):
    left = quantization_testing.quantized(left, used.lhs, (2,))
    right = quantization_testing.quantized(np.asarray(kernel), used.rhs, (1,))
    return left @ right

  hidden = testing.silu(multiply(rows, w["gate"])) * multiply(rows, w["up"])
  out = multiply(hidden * scales, w["down"])
  expected = np.zeros_like(x)
  for (t, j), slot in slots.items():
    expected[t] += out[ids[t, j], slot]
  error = np.abs(np.asarray(y).reshape(-1, D) - expected)
  # A value next to the middle of two numbers may round to the other one.
  assert np.mean(error <= 1e-4 * np.abs(expected) + 1e-4) > 0.97
  assert np.max(error) < 0.02 * np.max(np.abs(expected))
  unquantized = _expected(w).reshape(expected.shape)
  assert not np.allclose(expected, unquantized, rtol=1e-3)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_gradients_of_quantized_training_are_near_those_without(name):
  def gradient(layer, values):
    def loss(values):
      rngs = {"rounding": jax.random.key(3)}
      y = layer.apply(values, _x(), rngs=rngs)
      return jnp.sum(y * jax.random.normal(jax.random.key(4), y.shape))

    return jax.jit(jax.grad(loss))(values)

  layer = _layer(einsum_lib.QuantizedEinsum(recipes.named(name)))
  values = nn.unbox(jax.jit(layer.init)(jax.random.key(1), _x()))
  values["params"] = _params()
  if name == "fp8":
    state = values[einsum_lib.COLLECTION]["experts"]["einsum"]
    assert set(state) == {"gate", "up", "down"}
    # Delayed scales: each step tells the range of gradients one matmul further.
    for _ in range(2):
      made = gradient(layer, values)
      values = {**made, "params": _params()}
  actual = gradient(layer, values)["params"]["experts"]
  plain = gradient(_layer(jnp.einsum), {"params": _params()})
  plain = plain["params"]["experts"]
  for key, value in plain.items():
    distance = jnp.linalg.norm(actual[key] - value) / jnp.linalg.norm(value)
    assert 1e-4 < distance < 0.2, (key, distance)


def test_quantized_training_needs_a_capacity():
  quantized = einsum_lib.QuantizedEinsum(recipes.named("int8"))
  assert matmuls.is_provider(quantized)
  layer = _layer(quantized, dispatch.Dropless())
  with pytest.raises(ValueError, match="need a dispatch by capacity"):
    jax.eval_shape(layer.init, jax.random.key(0), _x())


def test_grouped_experts_have_no_adapters():
  einsum = lora.LoraEinsum(lora.Lora(rank=2))
  layer = _layer(einsum, dispatch.Dropless())
  message = "adapters of the experts experts need a dispatch by capacity"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(layer.init, jax.random.key(0), _x())


def test_adapters_of_experts_start_at_the_base():
  layer = _layer(lora.LoraEinsum(lora.Lora(rank=2)))
  values = nn.unbox(jax.jit(layer.init)(jax.random.key(0), _x()))
  adapters = values["params"]["experts"].pop("einsum")
  assert adapters["gate"]["lora_a"].shape == (E, D, 2)
  assert adapters["down"]["lora_b"].shape == (E, 2, D)
  base = jax.jit(_layer(jnp.einsum).apply)(values, _x())
  values["params"]["experts"]["einsum"] = adapters
  adapted = jax.jit(layer.apply)(values, _x())
  np.testing.assert_allclose(adapted, base, rtol=1e-6)
