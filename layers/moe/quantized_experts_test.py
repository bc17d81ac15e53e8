"""Quantized experts compared with the definition in float64."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.moe import (
  dispatch,
  experts,
  grouped_matmul,
  mixture,
  quantized_grouped_matmul,
  routers,
  testing,
)
from paxon.quantization import einsum as einsum_lib
from paxon.quantization import (
  lora,
  recipe,
  recipes,
  served_einsum,
  stored_kernels,
)
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
  rhs = served_einsum.serving_recipe(recipes.find_recipe(name)).rhs
  return {
    key: quantization_testing.quantize(np.asarray(w), rhs, (1,))
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
  rules = served_einsum.serving_recipe(recipes.find_recipe(name))
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


# Formats with scales of blocks, indices of a table, and zero points.
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["int4_group", "nf4", "mxfp4", "int4_hqq"])
def test_dropless_experts_are_served_in_formats_of_blocks(name):
  """They are the same by a capacity, which multiplies by other code."""
  x = jax.random.normal(jax.random.key(0), (1, 5, 256))
  used = served_einsum.serving_recipe(recipes.find_recipe(name))
  found = []
  values = nn.unbox(jax.jit(_layer(jnp.einsum).init)(jax.random.key(1), x))
  for form in (dispatch.Dropless(), dispatch.Capacity(minimum=5)):
    layer = _layer(served_einsum.ServedEinsum(used), form)
    _, made = jax.jit(
      functools.partial(layer.apply, mutable=[served_einsum.COLLECTION])
    )(values, x)
    made = nn.unbox(made)
    scale = made[served_einsum.COLLECTION]["experts"]["einsum"]["up"]["scale"]
    assert scale.shape[1] > 1
    found.append(jax.jit(layer.apply)({**values, **made}, x))
  np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)
  plain = jax.jit(_layer(jnp.einsum).apply)(values, x)
  assert not np.allclose(found[0], plain, rtol=1e-3)


@pytest.mark.nightly(keep=2)
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


@pytest.mark.nightly(keep=1)
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
  used = recipes.find_recipe(name)
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
    left = quantization_testing.quantize(left, used.lhs, (2,))
    right = quantization_testing.quantize(np.asarray(kernel), used.rhs, (1,))
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


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_gradients_of_quantized_training_are_near_those_without(name):
  def gradient(layer, values):
    def loss(values):
      rngs = {"rounding": jax.random.key(3)}
      y = layer.apply(values, _x(), rngs=rngs)
      return jnp.sum(y * jax.random.normal(jax.random.key(4), y.shape))

    return jax.jit(jax.grad(loss))(values)

  layer = _layer(einsum_lib.QuantizedEinsum(recipes.find_recipe(name)))
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


def _quantize(x, tensor_recipe, axis):
  """Returns values of current scales, dequantized, by definition."""
  current = recipe.TensorRecipe(
    tensor_recipe.format, granularity=recipe.Granularity.CHANNEL
  )
  axes = axis if isinstance(axis, tuple) else (axis,)
  return quantization_testing.quantize(np.asarray(x, "f4"), current, axes)


@pytest.mark.parametrize("name", ["fp8", "fp8_channel", "int8"])
def test_quantized_dropless_training_matches_the_definition(name):
  used = recipes.find_recipe(name)
  assert used.gradient is not None
  # Rounded to nearest, to be the same by definition.
  nearest = dataclasses.replace(
    used,
    gradient=dataclasses.replace(
      used.gradient, rounding=recipe.Rounding.NEAREST
    ),
  )
  sizes, w = np.asarray([3, 0, 4]), np.random.default_rng(0)
  x = w.normal(size=(9, D)) * np.arange(1, 10)[:, None]
  dy = w.normal(size=(9, F))
  w = w.normal(size=(3, D, F)) * np.asarray([1, 5, 30])[:, None, None]
  x, w, dy = (np.asarray(v, "f4") for v in (x, w, dy))
  # Rows behind the groups reach nothing.
  x[7:] = np.nan

  def compute(x, w):
    return quantized_grouped_matmul.grouped_matmul_by(
      nearest, x, w, jnp.asarray(sizes), kernel=grouped_matmul.Tiles()
    )

  y, transpose = jax.vjp(jax.jit(compute), jnp.asarray(x), jnp.asarray(w))
  dx, dw = transpose(jnp.asarray(dy))
  is_channel = used.lhs.granularity is recipe.Granularity.CHANNEL
  of_w, of_rows = (1, 0) if is_channel else ((1, 2), (0, 1))
  of_w_again = 2 if is_channel else (1, 2)
  begin = 0
  for e, size in enumerate(sizes):
    rows = slice(begin, begin + size)
    begin += size
    if not size:
      np.testing.assert_array_equal(dw[e], 0)
      continue
    kernel = _quantize(w[None, e], used.rhs, of_w)[0]
    again = _quantize(w[None, e], used.backward_rhs or used.rhs, of_w_again)[0]
    np.testing.assert_allclose(
      y[rows], _quantize(x[rows], used.lhs, 1) @ kernel, rtol=1e-4, atol=1e-3
    )
    np.testing.assert_allclose(
      dx[rows],
      _quantize(dy[rows], used.gradient, 1) @ again.T,
      rtol=1e-4,
      atol=1e-3,
    )
    expected = _quantize(x[rows], used.lhs, of_rows).T @ _quantize(
      dy[rows], used.gradient, of_rows
    )
    np.testing.assert_allclose(dw[e], expected, rtol=1e-4, atol=1e-3)
  np.testing.assert_array_equal(y[7:], 0)
  np.testing.assert_array_equal(dx[7:], 0)


@pytest.mark.nightly
def test_quantized_dropless_training_on_eight_devices():
  """Of int8, whose stochastic rounding needs a key on each device."""
  layer = _layer(
    einsum_lib.QuantizedEinsum(recipes.find_recipe("int8")),
    dispatch.Dropless(bound=9.0),
  )

  def gradient(params, x):
    def loss(params):
      rngs = {"rounding": jax.random.key(3)}
      return jnp.sum(layer.apply({"params": params}, x, rngs=rngs) ** 2)

    return jax.grad(loss)(params)["experts"]

  at = layout.Layout(mesh.make_mesh(_MESH))
  found = at.jit(gradient)(_params(), _x())
  expected = jax.jit(gradient)(_params(), _x())
  plain = _layer(jnp.einsum, dispatch.Dropless())
  exact = jax.jit(
    jax.grad(lambda p: jnp.sum(plain.apply({"params": p}, _x()) ** 2))
  )(_params())["experts"]
  for name, value in exact.items():
    for each in (found, expected):
      distance = jnp.linalg.norm(each[name] - value) / jnp.linalg.norm(value)
      assert 1e-4 < distance < 0.1, (name, distance)


@functools.cache
def _adapted(kind, storage=None):
  """Returns a layer with adapters, and values of which none is zero."""
  einsum = lora.LoraEinsum(
    lora.Lora(rank=2, alpha=3.0, kind=kind), storage=storage
  )
  layer = _layer(einsum, dispatch.Dropless())
  values = nn.unbox(jax.jit(layer.init)(jax.random.key(1), _x()))
  random = np.random.default_rng(0)
  values["params"]["experts"] = {
    **_params()["experts"],
    "einsum": jax.tree.map(
      lambda v: jnp.asarray(random.normal(0, 0.2, v.shape), jnp.float32),
      values["params"]["experts"]["einsum"],
    ),
  }
  return layer, values


def _merge(parameters, kind):
  """Returns kernels with their adapters, by definition in float64."""
  params = jax.tree.map(lambda v: np.asarray(v, np.float64), parameters)
  made, adapters = {}, params.pop("einsum")
  for name, each in adapters.items():
    kernel = params[name]
    scale = 3.0 / (2**0.5 if kind is lora.Kind.RSLORA else 2)
    whole = kernel + scale * each["lora_a"] @ each["lora_b"]
    if kind is lora.Kind.DORA:
      m = np.linalg.norm(kernel, axis=1) + each["lora_magnitude"]
      whole *= (m / np.linalg.norm(whole, axis=1))[:, None]
    made[name] = whole
  return made


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", list(lora.Kind))
def test_adapted_experts_are_those_of_the_definition(kind):
  layer, values = _adapted(kind)
  expected = _expected(_merge(values["params"]["experts"], kind))
  y = jax.jit(layer.apply)(values, _x())
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
  # A dispatch by capacity multiplies by other code.
  slots = layer.clone(dispatch=_ALL)
  np.testing.assert_allclose(
    jax.jit(slots.apply)(values, _x()), expected, rtol=1e-4, atol=1e-4
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("kind", "bound"), [(lora.Kind.LORA, 9.0), (lora.Kind.DORA, None)]
)
def test_adapted_experts_on_eight_devices(kind, bound):
  layer, values = _adapted(kind)
  layer = layer.clone(dispatch=dispatch.Dropless(bound=bound))

  def gradient(values, x):
    return jax.grad(lambda v: jnp.sum(layer.apply(v, x) ** 2))(values)

  at = layout.Layout(mesh.make_mesh(_MESH))
  found = at.jit(gradient)(values, _x())["params"]["experts"]["einsum"]
  expected = jax.jit(gradient)(values, _x())["params"]["experts"]["einsum"]
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4),
    found,
    expected,
  )


def test_parameters_of_adapters_of_experts_have_named_axes():
  layer, _ = _adapted(lora.Kind.DORA)
  made = jax.eval_shape(layer.init, jax.random.key(0), _x())
  adapters = made["params"]["experts"]["einsum"]
  found = {
    f"{matmul}/{name}": value.names
    for matmul, each in adapters.items()
    for name, value in each.items()
  }
  assert found["gate/lora_a"] == ("experts", "embed", None)
  assert found["gate/lora_b"] == ("experts", None, "mlp")
  assert found["down/lora_a"] == ("experts", "mlp", None)
  assert found["down/lora_b"] == ("experts", None, "embed")
  assert found["down/lora_magnitude"] == ("experts", "embed")


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  "storage", [stored_kernels.Storage.NF4, stored_kernels.Storage.INT8]
)
def test_stored_kernels_of_adapted_experts(storage):
  kind = lora.Kind.DORA
  layer, values = _adapted(kind, storage)
  experts_values = values["params"]["experts"]
  stored, kernels = {}, {}
  for name in ("gate", "up", "down"):
    kernel = experts_values[name]
    stored[name] = stored_kernels.quantize(kernel, storage, inputs=(1,))
    kernels[name] = stored_kernels.dequantize(
      stored[name], storage, shape=kernel.shape, inputs=(1,)
    )
  # The parameters are not read.
  empty = jax.tree.map(lambda v: jnp.full_like(v, jnp.nan), kernels)
  given = {**experts_values, **empty}
  tree = {
    "params": {**values["params"], "experts": given},
    "stored": {"experts": {"einsum": stored}},
  }
  merged = _merge({**experts_values, **kernels}, kind)
  expected = _expected(merged)
  y = jax.jit(layer.apply)(tree, _x())
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
  if storage is not stored_kernels.Storage.NF4:
    return
  at = layout.Layout(mesh.make_mesh(_MESH))
  np.testing.assert_allclose(
    at.jit(layer.apply)(tree, _x()), expected, rtol=1e-4, atol=1e-4
  )


@pytest.mark.parametrize("form", [_ALL, dispatch.Dropless()])
def test_adapters_of_experts_start_at_the_base(form):
  layer = _layer(lora.LoraEinsum(lora.Lora(rank=2)), form)
  values = nn.unbox(jax.jit(layer.init)(jax.random.key(0), _x()))
  adapters = values["params"]["experts"].pop("einsum")
  assert adapters["gate"]["lora_a"].shape == (E, D, 2)
  assert adapters["down"]["lora_b"].shape == (E, 2, D)
  base = jax.jit(_layer(jnp.einsum, form).apply)(values, _x())
  values["params"]["experts"]["einsum"] = adapters
  adapted = jax.jit(layer.apply)(values, _x())
  np.testing.assert_allclose(adapted, base, rtol=1e-6)
