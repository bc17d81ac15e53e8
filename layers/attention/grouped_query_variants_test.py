"""Tests for what attention can be told besides the plain definition.

One oracle knows of all settings; each case sets a few. What the rows of a mask
are is written out in `mask_test.py`; here the layer must hand it on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import (
  grouped_query,
  head_norm,
  kernels,
  position_bias,
)
from paxon.layers.attention import testing as attention_testing
from paxon.layers.positions import rotary_embedding

BATCH, LENGTH, EMBED, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 8, 4, 2, 4
# Two documents and padding; one document.
POSITIONS = testing.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], jnp.int32)
SEGMENTS = testing.array([[1, 1, 1, 2, 2, 0], [1] * 6], jnp.int32)
PREFIX = testing.array([[1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]], bool)
SINUSOIDS = 6
ROTARY = rotary_embedding.Rotary(max_wavelength=30.0)

# Everything at once, but for what excludes another: decoding is tested by it.
ALL = {
  "rotary": ROTARY,
  "window": 3,
  "use_bias": True,
  "logit_cap": 2.0,
  "query_norm": head_norm.HeadNorm(),
  "key_norm": head_norm.HeadNorm(),
  "after_rotary": True,
  "position_bias": position_bias.Alibi(),
  "logit_scale": 0.3,
  "output_bias": False,
  "sinks": kernels.LearnedSinks(),
  "query_scale": head_norm.PerDimScale(),
  "gated": True,
}
XL = {
  "relative_position": position_bias.TransformerXlPosition(
    embed_dim=SINUSOIDS, max_wavelength=30.0
  ),
  "position_bias": position_bias.Alibi(),
}
CASES = {
  "everything": ALL,
  "norms before rotation": {**ALL, "after_rotary": False, "window": None},
  "transformer xl": XL,
  "transformer xl, own scale, right window": {
    **XL,
    "logit_scale": 0.7,
    "causal": False,
    "window": 2,
    "right_window": 1,
  },
  "constant sinks": {"sinks": kernels.ConstantSinks(0.5), "window": 2},
  "chunks, bias of the output only": {"chunk": 2, "output_bias": True},
  "right window": {"causal": False, "right_window": 2},
}


def _layer(**kwargs):
  return attention_testing.grouped_query_attention(
    HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, **kwargs
  )


def _args():
  return testing.normal(BATCH, LENGTH, EMBED), POSITIONS, SEGMENTS


def _sees(layer, t, s, *, prefix=False):
  """Whether position `t` sees position `s` of its document."""
  if layer.mask.causal and s > t and not prefix:
    return False
  if (
    layer.mask.chunk is not None
    and t // layer.mask.chunk != s // layer.mask.chunk
  ):
    return False
  if layer.mask.right_window is not None and s - t > layer.mask.right_window:
    return False
  sides = t - s if layer.mask.right_window is not None else abs(t - s)
  return layer.mask.window is None or sides < layer.mask.window


def _turned(vector, position):
  half = vector.shape[-1] // 2
  angle = position * 30.0 ** (-np.arange(half) / half)
  turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * angle)
  return np.concatenate([turned.real, turned.imag])


def _placed(layer, params, name, vector, position):
  """A query or key of one head with its norm and rotation."""

  def norm(x):
    scale = params[f"{name}_norm"]["scale"]
    return x / np.sqrt(np.mean(x**2) + 1e-6) * scale

  has_norm = f"{name}_norm" in params
  if has_norm and not layer.head_norm.after_rotary:
    vector = norm(vector)
  if layer.rotary is not None:
    vector = _turned(vector, position)
  return norm(vector) if has_norm and layer.head_norm.after_rotary else vector


def _logit(layer, params, n, query, t, key, s):
  """The logit of a query and key, before the softmax."""
  query = _placed(layer, params, "query", query, t)
  key = _placed(layer, params, "key", key, s)
  if "query_scale" in params:
    # Pax's factor less the kernel's `H ** -0.5`.
    softplus = np.log1p(np.exp(params["query_scale"]["scale"]))
    query = query * softplus * 1.442695041
  product = query @ key
  if "relative_position" in params:
    p = params["relative_position"]
    exponent = np.arange(SINUSOIDS // 2) / (SINUSOIDS // 2)
    angle = (t - s) * 30.0**-exponent
    wave = np.concatenate([np.sin(angle), np.cos(angle)])
    relative = wave @ p["relative"][:, n]
    product = (
      query @ key
      + query @ relative
      + p["content_bias"][n] @ key
      + p["position_bias"][n] @ relative
    )
  logit = product * (layer.logits.scale or HEAD_DIM**-0.5)
  if layer.logits.position_bias is not None:
    # ALiBi's slopes of four heads: 1/4, 1/16, 1/64, 1/256.
    logit -= 4.0 ** -(n + 1) * abs(t - s)
  cap = layer.logits.cap
  if cap is not None:
    logit = cap * np.tanh(logit / cap)
  return logit


def _oracle(layer, params, *, prefix=None):
  """The definition, in float64 numpy, one query and head at a time."""
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), params)
  x, positions, segments = (np.asarray(a) for a in _args())
  x = x.astype(np.float64)
  made = {
    name: np.einsum("BTD,DNH->BTNH", x, p[name]) + p.get(f"{name}_bias", 0.0)
    for name in ("query", "key", "value", "gate")
    if name in p
  }
  out = np.zeros_like(x) + p.get("out_bias", 0.0)
  for b, t, n in np.ndindex(BATCH, LENGTH, HEADS):
    k = n // (HEADS // KV_HEADS)
    logits, seen = [], []
    for s in range(LENGTH):
      if segments[b, s] != segments[b, t] or segments[b, s] == 0:
        continue
      both = prefix is not None and bool(prefix[b, t] & prefix[b, s])
      at = positions[b, t], positions[b, s]
      if not _sees(layer, *at, prefix=both):
        continue
      query, key = made["query"][b, t, n], made["key"][b, s, k]
      logits.append(_logit(layer, p, n, query, at[0], key, at[1]))
      seen.append(made["value"][b, s, k])
    if not seen:
      continue
    nothing = 0.0
    if "sinks" in p:
      nothing = np.exp(p["sinks"]["sinks"][n])
    elif layer.logits.sinks is not None:
      nothing = np.exp(layer.logits.sinks.logit)
    share = np.exp(logits) / (np.sum(np.exp(logits)) + nothing)
    context = share @ np.stack(seen)
    if "gate" in made:
      context /= 1 + np.exp(-made["gate"][b, t, n])
    out[b, t] += context @ p["out"][n]
  return out


@pytest.mark.parametrize("case", CASES)
def test_matches_numpy(case):
  layer = _layer(**CASES[case])
  values = testing.random_values(layer, *testing.in_context(*_args()))
  np.testing.assert_allclose(
    testing.apply(layer, values, *testing.in_context(*_args())),
    _oracle(layer, values["params"]),
    rtol=1e-5,
    atol=1e-5,
  )


@pytest.mark.parametrize("settings", [{}, {"window": 3}], ids=str)
def test_a_prefix_sees_itself(settings):
  layer = _layer(**settings)
  values = testing.random_values(layer, *testing.in_context(*_args()))
  np.testing.assert_allclose(
    testing.apply(layer, values, *testing.in_context(*_args(), PREFIX)),
    _oracle(layer, values["params"], prefix=np.asarray(PREFIX)),
    rtol=1e-5,
    atol=1e-5,
  )


def test_gradients_match_finite_differences():
  layer = _layer(**ALL | XL | {"rotary": None})

  def loss(at):
    return jnp.sum(
      jnp.sin(
        layer.apply(at[0], *testing.in_context(at[1], POSITIONS, SEGMENTS))
      )
    )

  values = testing.random_values(layer, *testing.in_context(*_args()))
  testing.assert_gradients_match(loss, (values, _args()[0]), rtol=1e-5)


@pytest.mark.parametrize("case", ["everything", "transformer xl", "prefix"])
def test_decoding_gives_what_the_forward_pass_gives(case):
  """In Pax a norm of queries and keys was left out while decoding."""
  layer = _layer(**CASES.get(case, {}))
  args = (_args()[0], testing.make_positions(2, 6), testing.ones(2, 6))
  prefix = PREFIX[1:].repeat(2, axis=0) if case == "prefix" else None
  values = testing.random_values(layer, *testing.in_context(*args))
  expected = testing.apply(layer, values, *testing.in_context(*args, prefix))
  y, state = testing.apply(
    layer,
    values,
    *testing.in_context(
      *(np.asarray(a)[:, :4] for a in args),
      None if prefix is None else prefix[:, :4],
      cache_length=6,
    ),
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


def test_a_prefix_while_decoding_is_refused():
  layer, args = _layer(), (*_args(), PREFIX)
  values = testing.random_values(layer, *testing.in_context(*_args()))

  def prompt_and_step(values, args):
    cut = (a[:, :4] for a in args)
    _, state = layer.apply(
      values, *testing.in_context(*cut, cache_length=6), mutable=["cache"]
    )
    step = (a[:, 4:5] for a in args)
    return layer.apply(
      {**values, **state}, *testing.in_context(*step), mutable=["cache"]
    )

  with pytest.raises(ValueError, match=r"got a prefix while decoding; .*promp"):
    jax.eval_shape(prompt_and_step, values, args)


def test_keys_are_stored_once():
  """Pax kept them rotated and as they were, in a cache of twice the size."""
  layer = _layer(rotary=ROTARY)

  def init(*a):
    return layer.init(
      jax.random.key(0), *testing.in_context(*a, cache_length=6)
    )

  state = jax.eval_shape(init, *_args())["cache"]
  stored = [x for x in jax.tree.leaves(state) if x.ndim == 4]
  assert [x.shape for x in stored] == [(BATCH, KV_HEADS, 6, HEAD_DIM)] * 2


def test_names_and_axes():
  layer = _layer(**ALL | XL | {"rotary": None})
  axes = testing.axes(layer, *testing.in_context(*_args()))
  assert {k: v for k, v in axes.items() if k.count("/") > 1} == {
    "params/key_norm/scale": ("head_dim",),
    "params/query_norm/scale": ("head_dim",),
    "params/query_scale/scale": ("head_dim",),
    "params/relative_position/content_bias": ("heads", "head_dim"),
    "params/relative_position/position_bias": ("heads", "head_dim"),
    "params/relative_position/relative": ("embed", "heads", "head_dim"),
    "params/sinks/sinks": ("heads",),
  }
  assert "params/query_bias" in axes
  assert "params/out_bias" not in axes
  specs = testing.specs(layer, *testing.in_context(*_args()))["params"]
  undecayed = {s.name for s in jax.tree.leaves(specs) if not s.regularized}
  assert "params/relative_position/position_bias" in undecayed
  assert "params/relative_position/relative" not in undecayed


def test_a_scale_of_queries_changes_nothing_at_first():
  part = head_norm.PerDimScale()
  x = testing.normal(1, 2, 3, 4)
  values = testing.initial_values(part, x)
  np.testing.assert_array_equal(values["params"]["scale"], np.zeros(4))
  np.testing.assert_allclose(testing.apply(part, values, x), x, rtol=1e-6)


def test_kernels_hear_only_of_what_is_set():
  heard = []

  def kernel(query, key, value, mask, **more):
    heard.append(more)
    return kernels.plain(query, key, value, mask, **more)

  for settings in (
    {},
    {"logit_scale": 1.0},
    {"sinks": kernels.ConstantSinks()},
  ):
    layer = _layer(kernel=kernel, **settings)
    testing.specs(layer, *testing.in_context(*_args()))
  assert [sorted(more) for more in heard] == [[], ["scale"], ["sinks"]]


def test_rejects_a_scale_that_is_not_positive():
  with pytest.raises(
    ValueError, match=r"Logits\.scale must be positive, got 0"
  ):
    _layer(logit_scale=0.0)


def test_rejects_a_prefix_of_tokens_that_see_each_other():
  layer = _layer(causal=False)
  with pytest.raises(ValueError, match=r"q_prefix needs causal=True"):
    testing.specs(layer, *testing.in_context(*_args(), PREFIX))


def test_rejects_parts_without_sense():
  with pytest.raises(ValueError, match=r"ConstantSinks\.logit must be finite"):
    kernels.ConstantSinks(float("inf"))
  with pytest.raises(ValueError, match=r"embed_dim must be even, got 5"):
    position_bias.TransformerXlPosition(embed_dim=5)
  with pytest.raises(ValueError, match=r"embed_dim must be positive, got 0"):
    position_bias.TransformerXlPosition(embed_dim=0)
  with pytest.raises(ValueError, match=r"max_wavelength must exceed 1, got 1"):
    position_bias.TransformerXlPosition(embed_dim=4, max_wavelength=1.0)


def test_norm_of_all_heads_together():
  x = np.random.RandomState(0).standard_normal((2, 3, 4, 5))
  scale = np.random.RandomState(1).standard_normal((4, 5))
  norm = head_norm.AllHeadsNorm(epsilon=1e-3)
  y = testing.apply(
    norm,
    {"params": {"scale": jnp.asarray(scale, jnp.float32)}},
    jnp.asarray(x, jnp.float32),
  )
  mean = (x**2).mean(axis=(2, 3), keepdims=True)
  expected = x / np.sqrt(mean + 1e-3) * scale
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_rejects_a_limit_that_is_not_positive():
  with pytest.raises(ValueError, match=r"limit must be positive, got 0"):
    grouped_query.GroupedQueryAttention(
      2, num_kv_heads=2, head_dim=4, limit=0.0
    )
