"""Tests for n-grammers, against numpy from the definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing, token_context
from paxon.layers.attention import testing as attention_testing
from paxon.layers.losses import auxiliary_loss
from paxon.layers.quantizers import bregman, ngrammer, vector
from paxon.layers.recurrent import testing as recurrent_testing
from paxon.sharding import variables

HEADS, SIZE, IDS, BUCKETS = 2, 5, 50_021, 97
LAYER = ngrammer.Ngrammer(
  num_heads=HEADS, num_ids=IDS, ngram_vocab_size=BUCKETS, ngram_dim=3
)
CODES = LAYER.clone(
  num_ids=None,
  quantizer=vector.EmaVectorQuantizer(
    7, HEADS, normalize_input=False, normalize_codebook=False
  ),
)
LAYERS = {
  "concat": LAYER,
  "add": LAYER.clone(concat=False, ngram_dim=SIZE),
  "codes": CODES,
}
PCA = bregman.BregmanPca(2, end_step=10, coefficient_rate=0.1)
BREGMAN = ngrammer.BregmanNgrammer(HEADS, PCA, ngram_vocab_size=6, ngram_dim=3)
# Padding before, between and after documents; ids occur again.
PACKED = recurrent_testing.segments("1111122220333", "0011111111100")
CONTEXT = token_context.TokenContext(segment_ids=PACKED)
TOKENS = testing.array(
  np.random.default_rng(0).integers(0, IDS, PACKED.shape), np.int32
)


def _inputs(layer):
  x = testing.normal(*PACKED.shape, HEADS * SIZE)
  values = testing.random_values(layer, TOKENS, x)
  if layer is CODES:
    stats = values["batch_stats"]["quantizer"]
    stats["count"] = jnp.abs(stats["count"])
  return x, values


def _norm(x, p, name):
  x = (x - x.mean()) / np.sqrt(x.var() + 1e-6)
  return x * p[f"{name}_scale"] + p[f"{name}_bias"]


def _oracle(layer, values, x, heads, num_ids):
  p = {k: np.asarray(v, np.float64) for k, v in values["params"].items()}
  primes = [101, 103]
  y = np.zeros(x.shape)
  for b in range(x.shape[0]):
    before, segment = None, 0
    for t in range(x.shape[1]):
      if not PACKED[b, t]:
        continue
      if PACKED[b, t] != segment:
        before, segment = [0] * HEADS, PACKED[b, t]
      for n in range(HEADS):
        pair = int(heads[b, t, n]) + num_ids * int(before[n])
        bucket = ((n + 1) * pair + n + 1) % primes[n] % BUCKETS
        of_head = {k: v[n] for k, v in p.items()}
        ngram = _norm(of_head["table"][bucket], of_head, "ngram_norm")
        features = np.asarray(x[b, t], np.float64).reshape(HEADS, SIZE)[n]
        token = _norm(features, of_head, "token_norm")
        if layer.concat:
          token[SIZE - layer.ngram_dim :] = ngram
        else:
          token += ngram
        y[b, t, n * SIZE : (n + 1) * SIZE] = token
      before = heads[b, t]
  return y


@pytest.mark.parametrize("name", ["concat", "add"])
def test_pairs_of_token_ids(name):
  """Pairs of these ids need more than 31 bits."""
  layer = LAYERS[name]
  x, values = _inputs(layer)
  heads = np.repeat(np.asarray(TOKENS)[..., None], HEADS, axis=2)
  expected = _oracle(layer, values, x, heads, IDS)
  dirty = jnp.where(PACKED[..., None] != 0, x, jnp.nan)
  found = testing.apply(layer, values, TOKENS, dirty, CONTEXT)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_pairs_of_codes():
  x, values = _inputs(CODES)
  own = {"batch_stats": values["batch_stats"]["quantizer"]}
  codes = testing.apply(CODES.quantizer, own, x, PACKED != 0)
  assert len(np.unique(codes.ids)) > 3
  expected = _oracle(CODES, values, x, np.asarray(codes.ids), 7)
  found, losses = testing.apply(
    CODES, values, TOKENS, x, CONTEXT, mutable=[auxiliary_loss.COLLECTION]
  )
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(jax.tree.leaves(losses)[0], codes.loss, rtol=1e-6)


def test_pairs_of_coefficients():
  x, values = _inputs(BREGMAN)
  p = {k: np.asarray(v, np.float64) for k, v in values["params"].items()}
  heads = x.reshape(*PACKED.shape, HEADS, SIZE)
  found = [
    testing.apply(
      PCA,
      {"batch_stats": values["batch_stats"][f"pca_{n}"]},
      heads[:, :, n],
      PACKED != 0,
    )
    for n in range(HEADS)
  ]
  expected = np.zeros(x.shape)
  for b, t in np.argwhere(np.asarray(PACKED) != 0):
    for n in range(HEADS):
      own, before = np.asarray(found[n][b, t], np.float64), np.zeros(2)
      if t and PACKED[b, t - 1] == PACKED[b, t]:
        before = np.asarray(found[n][b, t - 1], np.float64)
      weights = np.einsum("c,d,cdv->v", own, before, p["correlation"][n])
      of_head = {k: v[n] for k, v in p.items()}
      ngram = _norm(weights @ p["table"][n], of_head, "ngram_norm")
      features = np.asarray(heads[b, t, n], np.float64)
      token = _norm(features, of_head, "token_norm")
      token[SIZE - 3 :] = ngram
      expected[b, t, n * SIZE : (n + 1) * SIZE] = token
  dirty = jnp.where(PACKED[..., None] != 0, x, jnp.nan)
  y = testing.apply(BREGMAN, values, None, dirty, CONTEXT)
  np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-4)
  # Training updates the components of each head.
  _, changed = testing.apply(
    BREGMAN,
    values,
    None,
    x,
    dataclasses.replace(CONTEXT, deterministic=False),
    mutable=["batch_stats"],
  )
  for n in range(HEADS):
    old, new = (
      np.asarray(v["batch_stats"][f"pca_{n}"]["components"])
      for v in (values, variables.unbox(changed))
    )
    assert np.abs(new - old).max() > 0


def test_gradients_of_correlations_match_finite_differences():
  x, values = _inputs(BREGMAN)
  weight = np.asarray(testing.normal(*x.shape, seed=3), np.float64)

  def loss(params):
    layer = BREGMAN.clone(param_dtype=jnp.float64)
    y = layer.apply(
      {"params": params, "batch_stats": values["batch_stats"]},
      None,
      x.astype(jnp.float64),
      CONTEXT,
    )
    return jnp.sum(y * weight)

  testing.assert_gradients_match(loss, values["params"])


def test_attention_has_n_grams_of_its_context():
  """The context is that of attention whose output is the identity."""
  layer = attention_testing.grouped_query_attention(
    HEADS, num_kv_heads=1, head_dim=SIZE, ngrammer=CODES
  )
  x = testing.normal(*PACKED.shape, HEADS * SIZE)
  values = testing.random_values(layer, x, CONTEXT)
  count = values["batch_stats"]["ngrammer"]["quantizer"]["count"]
  values["batch_stats"]["ngrammer"]["quantizer"]["count"] = jnp.abs(count)
  params = dict(values["params"])
  inner = {
    "params": params.pop("ngrammer"),
    "batch_stats": values["batch_stats"]["ngrammer"],
  }
  out = np.asarray(params["out"], np.float64)
  size = HEADS * SIZE
  params["out"] = testing.array(np.eye(size).reshape(HEADS, SIZE, size))
  plain = layer.clone(ngrammer=None)
  context = testing.apply(plain, {"params": params}, x, CONTEXT)
  own = {"batch_stats": inner["batch_stats"]["quantizer"]}
  ids = testing.apply(CODES.quantizer, own, context, PACKED != 0).ids
  joined = _oracle(CODES, inner, context, np.asarray(ids), 7)
  expected = np.einsum(
    "btnh,nhd->btd", joined.reshape(*PACKED.shape, HEADS, SIZE), out
  )
  found = testing.apply(layer, values, x, CONTEXT)
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
  # Training updates the codes.
  context = dataclasses.replace(CONTEXT, deterministic=False)
  _, made = testing.apply(layer, values, x, context, mutable=["batch_stats"])
  old, new = (jax.tree.leaves(v["batch_stats"]) for v in (values, made))
  assert any(np.any(a != b) for a, b in zip(old, new, strict=True))
  with pytest.raises(ValueError, match="needs token ids, which the context of"):
    layer.clone(ngrammer=LAYER).init(jax.random.key(0), x, CONTEXT)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["concat", "codes", "bregman"])
def test_steps_equal_the_whole_sequence(name):
  layer = LAYERS.get(name, BREGMAN)
  x, values = _inputs(layer)
  whole = testing.apply(layer, values, TOKENS, x, CONTEXT)
  for splits in ([4, 5, 6, 7, 8], [6, 9]):
    outputs, state, begin = [], {}, 0
    for end in [*splits, 13]:
      y, state = testing.apply(
        layer,
        {**values, **state},
        TOKENS[:, begin:end],
        x[:, begin:end],
        token_context.TokenContext(
          segment_ids=PACKED[:, begin:end],
          cache_length=None if begin else 13,
        ),
        mutable=["cache"],
      )
      outputs.append(y)
      begin = end
    steps = jnp.concatenate(outputs, axis=1)
    np.testing.assert_allclose(steps, whole, rtol=1e-5, atol=1e-5)


def test_gradients_match_finite_differences():
  x, values = _inputs(LAYER)
  weight = np.asarray(testing.normal(*x.shape, seed=3), np.float64)

  def loss(at):
    layer = LAYER.clone(param_dtype=jnp.float64)
    y = layer.apply({"params": at["params"]}, TOKENS, at["x"], CONTEXT)
    return jnp.sum(y * weight)

  testing.assert_gradients_match(loss, {"params": values["params"], "x": x})


def test_large_vocabularies_are_hashed_exactly():
  draw = np.random.default_rng(1)
  ids, before = draw.integers(0, 250_000, (2, 1, 400, 3))
  found = ngrammer.find_buckets(
    testing.array(ids, np.int32),
    testing.array(before, np.int32),
    num_ids=250_000,
    num_buckets=768 * 256,
  )
  sieve = np.ones(200_000, bool)
  for d in range(2, 448):
    sieve[2 * d :: d] = False
  primes = [int(p) for p in np.flatnonzero(sieve) if p > 768 * 256][:3]
  assert ngrammer.find_primes(768 * 256, 3) == primes
  for n, prime in enumerate(primes):
    pair = ids[..., n] + 250_000 * before[..., n]
    expected = ((n + 1) * pair + n + 1) % prime % (768 * 256)
    np.testing.assert_array_equal(found[..., n], expected)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"num_ids": None}, r"needs one of num_ids .* quantizer=None"),
    (
      {"ngram_vocab_size": 1},
      r"ngram_vocab_size must be between 2 and 2\*\*20",
    ),
    ({"num_heads": 3}, r"num_heads \(3\) must divide the 10 features"),
    ({"ngram_dim": 6}, r"ngram_dim must be at most the 5 features of"),
    (
      {"concat": False},
      r"must be without concat the 5 features of a",
    ),
  ],
)
def test_rejects_wrong_fields(fields, message):
  x = testing.normal(*PACKED.shape, HEADS * SIZE)
  with pytest.raises(ValueError, match=message):
    LAYER.clone(**fields).init(jax.random.key(0), TOKENS, x)


def test_rejects_a_quantizer_of_other_groups():
  x = testing.normal(*PACKED.shape, HEADS * SIZE)
  layer = CODES.clone(quantizer=vector.EmaVectorQuantizer(7, 1))
  with pytest.raises(ValueError, match=r"gives 1 ids of a token, but num"):
    layer.init(jax.random.key(0), TOKENS, x)
