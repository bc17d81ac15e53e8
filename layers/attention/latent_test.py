"""Tests for multi-head latent attention."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import (
  kernels,
  kv_cache,
  latent,
  projections,
  sequence_cache,
  sliding_cache,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.norms import rms_norm
from paxon.layers.positions import rotary_embedding
from paxon.quantization import lora
from paxon.sharding import layout, mesh, variables

BATCH, LENGTH, EMBED = 2, 6, 8
HEADS, HEAD, ROPE, VALUE, LATENT, QUERY_LATENT = 2, 3, 4, 5, 6, 7
POSITIONS = testing.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], jnp.int32)
SEGMENTS = testing.array([[1, 1, 1, 2, 2, 0], [1] * 6], jnp.int32)


def _layer(**fields):
  return latent.LatentAttention(
    num_heads=HEADS,
    head_dim=HEAD,
    rope_dim=ROPE,
    value_dim=VALUE,
    latent_dim=LATENT,
    rotary=rotary_embedding.Rotary(),
    **fields,
  )


def _deepseek(**fields):
  dtype = fields.get("dtype")
  return _layer(
    query_latent_dim=QUERY_LATENT,
    latent_norm=rms_norm.RmsNorm(dtype=dtype),
    query_latent_norm=rms_norm.RmsNorm(dtype=dtype),
    **fields,
  )


def _x():
  return testing.normal(BATCH, LENGTH, EMBED)


def _args():
  return _x(), POSITIONS, SEGMENTS


def _turned(vector, position):
  """Half-split rotary embedding of one head, by complex numbers."""
  half = vector.shape[-1] // 2
  angle = position * 10_000.0 ** (-np.arange(half) / half)
  turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * angle)
  return np.concatenate([turned.real, turned.imag])


def _normed(vector, scale):
  return vector / np.sqrt(np.mean(vector**2) + 1e-6) * scale


def _oracle(params, x, *, scale=None, window=None):
  """Equations 9 to 19 of the paper, in float64 numpy, a head at a time."""
  w = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  x = np.asarray(x, np.float64)
  positions, segments = np.asarray(POSITIONS), np.asarray(SEGMENTS)
  scale = scale or 1 / np.sqrt(HEAD + ROPE)

  def kept(b, s):
    both = x[b, s] @ w["latent"]["kernel"]
    c, k = both[:LATENT], both[LATENT:]
    if "latent_norm" in w:
      c = _normed(c, w["latent_norm"]["scale"])
    return c, _turned(k, positions[b, s])

  out = np.zeros_like(x)
  for b, t, n in np.ndindex(BATCH, LENGTH, HEADS):
    c_query = x[b, t]
    if "query_latent" in w:
      c_query = c_query @ w["query_latent"]["kernel"]
      c_query = _normed(c_query, w["query_latent_norm"]["scale"])
    query = c_query @ w["query"][:, n]
    turned = _turned(query[HEAD:], positions[b, t])
    logits, values = [], []
    for s in range(LENGTH):
      distance = positions[b, t] - positions[b, s]
      same = segments[b, s] == segments[b, t] != 0
      if not same or distance < 0 or (window and distance >= window):
        continue
      c, k = kept(b, s)
      logits.append((query[:HEAD] @ (c @ w["key"][:, n]) + turned @ k) * scale)
      values.append(c @ w["value"][:, n])
    if values:
      share = np.exp(logits) / np.sum(np.exp(logits))
      out[b, t] += share @ np.stack(values) @ w["out"][n]
  return out


@pytest.mark.parametrize(
  ("make", "fields"),
  [
    (_deepseek, {}),
    (_layer, {}),
    (_layer, {"logit_scale": 0.7, "mask": attention_mask.MaskRules(window=2)}),
    # One width for all: queries, keys and values get zeros.
    (_layer, {"kernel": kernels.fused}),
  ],
  ids=["deepseek", "no_query_latent", "scale_and_window", "one_width"],
)
def test_matches_numpy(make, fields):
  layer = make(**fields)
  values = testing.random_values(layer, *testing.in_context(*_args()))
  expected = _oracle(
    values["params"],
    _x(),
    scale=fields.get("logit_scale"),
    window=fields["mask"].window if "mask" in fields else None,
  )
  got = testing.apply(layer, values, *testing.in_context(*_args()))
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_gradients_match_finite_differences():
  layer = _deepseek()
  values = testing.random_values(layer, *testing.in_context(*_args()))

  def loss(at):
    return jnp.sum(
      jnp.sin(
        layer.apply(at[0], *testing.in_context(at[1], POSITIONS, SEGMENTS))
      )
    )

  testing.assert_gradients_match(loss, (values, _x()), rtol=1e-5)


def test_a_packed_row_is_its_documents():
  layer = _deepseek()
  values = testing.random_values(layer, *testing.in_context(*_args()))
  packed = testing.apply(layer, values, *testing.in_context(*_args()))
  # One row each; what a shorter one ends with is padding.
  x = jnp.stack([_x()[0, :3], jnp.pad(_x()[0, 3:5], [(0, 1), (0, 0)])])
  segments = testing.array([[1, 1, 1], [1, 1, 0]], jnp.int32)
  alone = testing.apply(
    layer,
    values,
    *testing.in_context(x, testing.make_positions(2, 3), segments),
  )
  for at, row in ((slice(0, 3), alone[0]), (slice(3, 5), alone[1, :2])):
    np.testing.assert_allclose(packed[0, at], row, rtol=1e-5, atol=1e-6)


CACHES = {
  "contiguous": (kv_cache.ContiguousCache, None),
  "sliding": (lambda: sliding_cache.SlidingCache(3), 3),
  "sequence": (sequence_cache.SequenceCache, None),
}


_ADAPTER = lora.Lora(rank=2, alpha=5.0, kind=lora.Kind.DORA)


@pytest.mark.parametrize(
  ("name", "einsum"),
  [
    *((name, jnp.einsum) for name in CACHES),
    # The kernels that are absorbed have adapters, too.
    ("contiguous", lora.LoraEinsum(_ADAPTER)),
  ],
)
def test_decoding_by_latents_gives_what_the_forward_pass_gives(name, einsum):
  cache, window = CACHES[name]
  rules = attention_mask.MaskRules(window=window)
  layer = _deepseek(cache=cache(), mask=rules, einsum=einsum)
  x, positions, segments = (
    _x(),
    testing.make_positions(2, 6),
    testing.ones(2, 6),
  )
  args = (x, positions, segments)
  values = testing.random_values(layer, *testing.in_context(*args))
  expected = testing.apply(layer, values, *testing.in_context(*args))
  cut = lambda a, b: [y[:, a:b] for y in args]  # noqa: E731
  y, state = testing.apply(
    layer,
    values,
    *testing.in_context(*cut(0, 4), cache_length=LENGTH),
    mutable=["cache"],
  )
  kept = variables.unbox(state)["cache"]["cache"]
  assert kept["key"].shape == (BATCH, 1, window or LENGTH, LATENT + ROPE)
  assert set(kept) == {"key", "positions", "segment_ids", "index"}
  outputs = [y]
  step = jax.jit(
    lambda v, *a: layer.apply(v, *testing.in_context(*a), mutable=["cache"])
  )
  for t in range(4, LENGTH):
    y, state = step({**values, **state}, *cut(t, t + 1))
    outputs.append(y)
  np.testing.assert_allclose(
    np.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=1e-6
  )


def test_keys_of_heads_are_not_made_while_decoding():
  equations = []

  def einsum(equation, *args):
    equations.append(equation)
    return jnp.einsum(equation, *args)

  layer = _layer(einsum=einsum)
  values = testing.random_values(layer, *testing.in_context(*_args()))

  def prefill():
    return layer.apply(
      values, *testing.in_context(*_args(), cache_length=9), mutable=["cache"]
    )

  _, state = jax.eval_shape(prefill)
  assert "BSR,RNH->BSNH" in equations
  equations.clear()
  last = [a[:, -1:] for a in _args()]

  def step(s):
    return layer.apply(
      {**values, **s}, *testing.in_context(*last), mutable=["cache"]
    )

  jax.eval_shape(step, state)
  assert "BSR,RNH->BSNH" not in equations
  assert "BTNH,RNH->BTNR" in equations


def test_sharded_decoding_gives_the_same_numbers():
  layer = _deepseek(cache=sequence_cache.SequenceCache())
  args = (_x(), testing.make_positions(2, 6), testing.ones(2, 6))
  values = testing.random_values(layer, *testing.in_context(*args))
  expected = testing.apply(layer, values, *testing.in_context(*args))
  spec = mesh.MeshSpec.parse("data=2,sequence=2,tensor=2")
  laid = layout.Layout(mesh.make_mesh(spec))

  @laid.jit
  def run(values, *args):
    cut = lambda a, b: [y[:, a:b] for y in args]  # noqa: E731
    _, state = layer.apply(
      values, *testing.in_context(*cut(0, 4), cache_length=8), mutable=["cache"]
    )
    y, _ = layer.apply(
      {**values, **state}, *testing.in_context(*cut(4, 5)), mutable=["cache"]
    )
    return y

  np.testing.assert_allclose(
    run(values, *args), expected[:, 4:5], rtol=1e-5, atol=1e-6
  )


def test_bfloat16_compute_keeps_float32_params():
  layer = _deepseek(dtype=jnp.bfloat16)
  values = testing.random_values(layer, *testing.in_context(*_args()))
  x = _x().astype(jnp.bfloat16)
  y = testing.apply(layer, values, *testing.in_context(x, POSITIONS, SEGMENTS))
  assert y.dtype == jnp.bfloat16
  dtypes = {p.dtype for p in jax.tree.leaves(values["params"])}
  assert dtypes == {jnp.dtype("float32")}


def test_logical_axes():
  assert testing.axes(
    _deepseek(), *testing.in_context(*_args(), cache_length=9)
  ) == {
    "params/query_latent/kernel": ("embed", "rank"),
    "params/query_latent_norm/scale": ("embed",),
    "params/query": ("embed", "heads", "head_dim"),
    "params/latent/kernel": ("embed", "rank"),
    "params/latent_norm/scale": ("embed",),
    "params/key": ("embed", "heads", "head_dim"),
    "params/value": ("embed", "heads", "head_dim"),
    "params/out": ("heads", "head_dim", "embed"),
    # One head for all is whole on every device.
    "cache/cache/key": ("batch", None, "kv_length", "head_dim"),
    "cache/cache/positions": ("batch", "kv_length"),
    "cache/cache/segment_ids": ("batch", "kv_length"),
    "cache/cache/index": (),
  }


def test_rejects_what_does_not_go_together():
  with pytest.raises(ValueError, match=r"latent_dim must be positive, got 0"):
    latent.LatentAttention(2, 4, 4, 4, 0, rotary_embedding.Rotary())
  with pytest.raises(ValueError, match=r"rope_dim must be even .* got 3"):
    latent.LatentAttention(2, 4, 3, 4, 4, rotary_embedding.Rotary())
  message = r"query_latent_norm needs query_latent_dim"
  with pytest.raises(ValueError, match=message):
    _layer(query_latent_norm=rms_norm.RmsNorm())
  layer = _layer(cache=sliding_cache.SlidingCache(2))
  with pytest.raises(ValueError, match=r"LatentAttention attends to all pos"):
    testing.specs(layer, *testing.in_context(*_args()))
  prefix = jnp.zeros((2, 6), bool)
  message = r"got a prefix while decoding"

  def decode_with_prefix():
    layer, args = _layer(), _args()
    y, state = layer.init_with_output(
      jax.random.key(0), *testing.in_context(*args, cache_length=9)
    )
    return layer.apply(
      state, *testing.in_context(y, *args[1:], prefix), mutable=["cache"]
    )

  with pytest.raises(ValueError, match=message):
    jax.eval_shape(decode_with_prefix)


def test_rejects_combined_projections(monkeypatch):
  # Tests check annotations, programs do not.
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
  message = r"LatentAttention\.projections must be Separate.*, got CombinedProj"
  with pytest.raises(ValueError, match=message):
    _layer(projections=projections.CombinedProjections())
