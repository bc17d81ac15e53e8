"""Tests for the projections of attention, and for its biases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import (
  head_norm,
  kernels,
  position_bias,
  projections,
)
from paxon.layers.attention import testing as attention_testing
from paxon.layers.positions import rotary_embedding, rotary_scaling
from paxon.sharding import layout, mesh

BATCH, LENGTH, EMBED, HEAD_DIM = 2, 6, 8, 4
POSITIONS = testing.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], jnp.int32)
SEGMENTS = testing.array([[1, 1, 1, 2, 2, 0], [1] * 6], jnp.int32)
HEADS = pytest.mark.parametrize(
  "heads", [(4, 4), (4, 2), (3, 1)], ids=["multi-head", "grouped", "one key"]
)


def _layer(heads=(4, 2), *, combined=True, **kwargs):
  return attention_testing.grouped_query_attention(
    heads[0],
    num_kv_heads=heads[1],
    head_dim=HEAD_DIM,
    combined=combined,
    **kwargs,
  )


def _args():
  return testing.normal(BATCH, LENGTH, EMBED), POSITIONS, SEGMENTS


def _apart(params, heads):
  """The parameters of separate projections, by the documented storage."""
  params, (N, K) = dict(params), heads
  for suffix in ("", "_bias"):
    if f"qkv{suffix}" not in params:
      continue
    qkv = np.asarray(params.pop(f"qkv{suffix}"))
    if N == K:
      query, key, value = np.moveaxis(qkv, -3, 0)
    else:
      group, width = N // K, qkv.shape[-1]
      query = qkv[..., :group, :].reshape(*qkv.shape[:-3], N, width)
      key, value = qkv[..., group, :], qkv[..., group + 1, :]
    params |= {
      f"query{suffix}": query,
      f"key{suffix}": key,
      f"value{suffix}": value,
    }
  return {"params": params}


@HEADS
@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no bias"])
def test_combined_is_separate_stored_as_one(heads, use_bias):
  settings = {"use_bias": use_bias, "rotary": rotary_embedding.Rotary()}
  combined = _layer(heads, **settings)
  separate = _layer(heads, combined=False, **settings)
  values = testing.random_values(combined, *testing.in_context(*_args()))
  np.testing.assert_allclose(
    testing.apply(combined, values, *testing.in_context(*_args())),
    testing.apply(
      separate, _apart(values["params"], heads), *testing.in_context(*_args())
    ),
    rtol=1e-5,
    atol=1e-6,
  )


@HEADS
def test_biases_match_numpy(heads):
  """One document, causal, in float64 numpy; rotation has its own tests."""
  layer = _layer(heads, use_bias=True)
  x, positions = testing.normal(1, 4, EMBED), testing.make_positions(1, 4)
  values = testing.random_values(
    layer, *testing.in_context(x, positions, testing.ones(1, 4))
  )
  p = _apart(values["params"], heads)["params"]
  p = {k: np.asarray(v, np.float64) for k, v in p.items()}
  given = np.asarray(x, np.float64)[0]
  expected = np.tile(p["out_bias"], (4, 1))
  for t, n in np.ndindex(4, heads[0]):
    k = n // (heads[0] // heads[1])
    query = given[t] @ p["query"][:, n] + p["query_bias"][n]
    key = given[: t + 1] @ p["key"][:, k] + p["key_bias"][k]
    value = given[: t + 1] @ p["value"][:, k] + p["value_bias"][k]
    share = np.exp(key @ query / HEAD_DIM**0.5)
    expected[t] += (share / share.sum()) @ value @ p["out"][n]
  y = testing.apply(
    layer, values, *testing.in_context(x, positions, testing.ones(1, 4))
  )
  np.testing.assert_allclose(y[0], expected, rtol=1e-5, atol=1e-5)


def test_gradients_match_finite_differences():
  layer = _layer(use_bias=True, logit_cap=2.0)

  def loss(at):
    return jnp.sum(
      jnp.sin(
        layer.apply(at[0], *testing.in_context(at[1], POSITIONS, SEGMENTS))
      )
    )

  values = testing.random_values(layer, *testing.in_context(*_args()))
  # A value added to all keys moves all logits of a query alike, but for the
  # cap; its influence is small and not zero.
  testing.assert_gradients_match(loss, (values, _args()[0]), rtol=1e-5)


def test_combined_starts_as_separate_does():
  """Each part has the variance of its own fan-in, and is drawn apart."""
  args = (
    testing.normal(1, 2, 64),
    testing.make_positions(1, 2),
    testing.ones(1, 2),
  )
  for heads in ((16, 16), (16, 8)):
    params = testing.initial_values(_layer(heads), *testing.in_context(*args))[
      "params"
    ]
    parts = _apart(params, heads)["params"]
    for name in ("query", "key", "value"):
      np.testing.assert_allclose(np.std(parts[name]), 64**-0.5, rtol=0.05)
    assert np.any(parts["key"] != parts["value"])


@pytest.mark.parametrize("combined", [True, False], ids=["one", "three"])
@pytest.mark.parametrize("heads", [(16, 16), (16, 8)], ids=str)
def test_starts_as_gshard_does(heads, combined):
  """Standard deviations of the paper, for D 64, N 16, H 8."""
  layer = attention_testing.grouped_query_attention(
    heads[0],
    num_kv_heads=heads[1],
    head_dim=8,
    combined=combined,
    query_init=projections.gshard_query,
    kernel_init=projections.gshard_key_value,
    output_init=projections.gshard_output,
  )
  args = (
    testing.normal(1, 2, 64),
    testing.make_positions(1, 2),
    testing.ones(1, 2),
  )
  params = testing.initial_values(layer, *testing.in_context(*args))["params"]
  parts = _apart(params, heads)["params"]
  expected = {"query": 64 * 8, "key": 64, "value": 64, "out": 16 * 8}
  for name, terms in expected.items():
    deviation = np.std(np.asarray(parts[name]))
    np.testing.assert_allclose(deviation, terms**-0.5, rtol=0.05, err_msg=name)


def test_biases_of_queries_keys_and_values_only():
  """As Qwen 2 has them; and of the output only."""
  layer = _layer(combined=False, use_bias=True, output_bias=False)
  names = set(testing.axes(layer, *testing.in_context(*_args())))
  assert {n for n in names if n.endswith("_bias")} == {
    "params/query_bias",
    "params/key_bias",
    "params/value_bias",
  }
  names = testing.axes(_layer(output_bias=True), *testing.in_context(*_args()))
  assert [n for n in names if n.endswith("_bias")] == ["params/out_bias"]


@pytest.mark.parametrize("combined", [True, False])
def test_gradients_of_tokens_are_added_before_they_are_cast(combined):
  layer = _layer(combined=combined, dtype=jnp.bfloat16, use_bias=True)
  x = _args()[0].astype(jnp.bfloat16)
  values = testing.random_values(layer, *testing.in_context(*_args()))

  def loss(x):
    y = layer.apply(values, *testing.in_context(x, POSITIONS, SEGMENTS))
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))

  wide = jax.grad(loss)(x.astype(jnp.float32))
  narrow = jax.grad(loss)(x)
  assert (wide.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
  np.testing.assert_array_equal(wide, narrow.astype(jnp.float32))


def test_names_axes_and_decay():
  specs = testing.specs(
    _layer((4, 4), use_bias=True), *testing.in_context(*_args())
  )["params"]
  assert {k: (s.shape, s.axes, s.regularized) for k, s in specs.items()} == {
    "qkv": ((8, 3, 4, 4), ("embed", None, "heads", "head_dim"), True),
    "qkv_bias": ((3, 4, 4), (None, "heads", "head_dim"), False),
    "out": ((4, 4, 8), ("heads", "head_dim", "embed"), True),
    "out_bias": ((8,), ("embed",), False),
  }
  axes = testing.axes(_layer(use_bias=True), *testing.in_context(*_args()))
  assert axes["params/qkv"] == ("embed", "kv_heads", None, "head_dim")
  assert axes["params/qkv_bias"] == ("kv_heads", None, "head_dim")
  axes = testing.axes(
    _layer(use_bias=True, combined=False), *testing.in_context(*_args())
  )
  assert axes["params/query_bias"] == ("heads", "head_dim")
  assert axes["params/key_bias"] == ("kv_heads", "head_dim")
  assert axes["params/value_bias"] == ("kv_heads", "head_dim")


def test_combined_is_one_product():
  calls = []

  def einsum(equation, *args):
    calls.append(equation)
    return jnp.einsum(equation, *args)

  for heads in ((4, 4), (4, 2)):
    values = testing.random_values(_layer(heads), *testing.in_context(*_args()))
    testing.apply(
      _layer(heads, einsum=einsum), values, *testing.in_context(*_args())
    )
  assert calls == [
    *("BTD,DCNH->BTCNH", "BTNH,NHD->BTD"),
    *("BTD,DKCH->BTKCH", "BTNH,NHD->BTD"),
  ]


@pytest.mark.parametrize(
  ("heads", "settings"),
  [
    pytest.param((4, 4), {"use_bias": True}, id="multi-head"),
    pytest.param(
      (8, 4),
      {
        "use_bias": True,
        "query_norm": head_norm.HeadNorm(),
        "key_norm": head_norm.HeadNorm(),
        "position_bias": position_bias.RelativeBias(4, 6),
      },
      id="grouped, norms, bias by position",
    ),
    pytest.param(
      (8, 4),
      {
        "window": 3,
        "relative_position": position_bias.TransformerXlPosition(embed_dim=4),
        "query_scale": head_norm.PerDimScale(),
        "sinks": kernels.LearnedSinks(),
      },
      id="grouped, transformer xl, scale, sinks",
    ),
  ],
)
def test_tensor_parallelism_moves_the_output_only(heads, settings):
  """Sharded equals unsharded, and one all-reduce is all communication."""
  layer, args = _layer(heads, **settings), _args()
  values = testing.random_values(layer, *testing.in_context(*args))
  spec = mesh.MeshSpec.parse("data=2,tensor=4")
  where = layout.Layout(mesh.make_mesh(spec))
  shardings = where.shardings(testing.specs(layer, *testing.in_context(*args)))
  batch = tuple(where.batch_sharding(a.ndim) for a in args)
  compiled = (
    where.jit(
      lambda v, *a: layer.apply(v, *testing.in_context(*a)),
      in_shardings=(shardings, *batch),
    )
    .lower(values, *args)
    .compile()
  )
  placed = testing.place((values, *args), compiled.input_shardings[0])
  np.testing.assert_allclose(
    compiled(*placed),
    testing.apply(layer, values, *testing.in_context(*args)),
    rtol=1e-5,
    atol=1e-6,
  )
  text = compiled.as_text()
  assert text.count(" all-reduce(") == 1
  for moved in ("all-gather", "all-to-all", "collective-permute"):
    assert f" {moved}(" not in text


@pytest.mark.parametrize(
  "settings",
  [
    pytest.param({"heads": (4, 4), "use_bias": True}, id="combined"),
    pytest.param({"logit_cap": 1.5}, id="combined, grouped, cap"),
    pytest.param({"combined": False, "use_bias": True}, id="separate"),
    pytest.param(
      {
        "rotary": rotary_embedding.Rotary(
          max_wavelength=50.0,
          scaling=rotary_scaling.Llama3Scaling(original_length=64),
        )
      },
      id="scaled rotary",
    ),
  ],
)
def test_decoding_gives_what_the_forward_pass_gives(settings):
  layer = _layer(**{"rotary": rotary_embedding.Rotary(), **settings})
  args = (_args()[0], testing.make_positions(2, 6), testing.ones(2, 6))
  values = testing.random_values(layer, *testing.in_context(*args))
  expected = testing.apply(layer, values, *testing.in_context(*args))
  y, state = testing.apply(
    layer,
    values,
    *testing.in_context(*(np.asarray(a)[:, :4] for a in args), cache_length=6),
    mutable=["cache"],
  )
  outputs = [y]
  step = jax.jit(
    lambda v, *a: layer.apply(v, *testing.in_context(*a), mutable=["cache"])
  )
  for t in range(4, 6):
    y, state = step(
      {**values, **state}, *(np.asarray(a)[:, t : t + 1] for a in args)
    )
    outputs.append(y)
  np.testing.assert_allclose(
    np.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=1e-6
  )


def test_equal_settings_are_equal():
  assert _layer() == _layer()
  assert hash(_layer()) == hash(_layer())
  assert testing.specs(
    _layer(), *testing.in_context(*_args())
  ) == testing.specs(_layer(), *testing.in_context(*_args()))


@pytest.mark.parametrize("cap", [0.0, float("nan")])
def test_rejects_a_cap_that_is_not_positive(cap):
  message = r"Logits\.cap must be positive, got"
  with pytest.raises(ValueError, match=message):
    _layer(logit_cap=cap)
