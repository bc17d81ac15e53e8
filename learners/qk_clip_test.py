"""QK-clip against its definition in float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import qk_clip, testing

LAYERS, EMBED, HEADS, KEYS, WIDTH = 3, 5, 4, 2, 6


def _specs(is_scanned, *, bias=True, names=("query", "key")):
  depth = (LAYERS,) if is_scanned else ()
  stacked = (("layers", 1),) if is_scanned else ()
  layers = ("layers",) if is_scanned else ()

  def spec(name, shape, axes, collection="params"):
    return testing.spec(
      f"{collection}/attention/{name}",
      (*depth, *shape),
      axes=(*layers, *axes),
      stacked=stacked,
    )

  params = {
    names[0]: spec(
      "query", (EMBED, HEADS, WIDTH), ("embed", "heads", "head_dim")
    ),
    names[1]: spec(
      "key", (EMBED, KEYS, WIDTH), ("embed", "kv_heads", "head_dim")
    ),
    "value": spec(
      "value", (EMBED, KEYS, WIDTH), ("embed", "kv_heads", "head_dim")
    ),
  }
  if bias:
    params["query_bias"] = spec(
      "query_bias", (HEADS, WIDTH), ("heads", "head_dim")
    )
  maximum = spec("max_logits/maximum", (HEADS,), ("heads",), "max_logits")
  return {
    "params": {"attention": params},
    "max_logits": {"attention": {"max_logits": {"maximum": maximum}}},
  }


def _maxima(values):
  return {
    "max_logits": {
      "attention": {"max_logits": {"maximum": jnp.asarray(values, jnp.float32)}}
    }
  }


def _logits(params, layer, x):
  """Returns q k of two tokens, [heads], in float64."""
  query, key = (
    np.asarray(params[n], np.float64)[layer] for n in ("query", "key")
  )
  bias = np.asarray(params["query_bias"], np.float64)[layer]
  queries = np.einsum("d,dnh->nh", x[0], query) + bias
  keys = np.einsum("d,dkh->kh", x[1], key)
  return np.einsum("nh,nh->n", queries, np.repeat(keys, HEADS // KEYS, axis=0))


def test_logits_of_each_head_are_scaled_by_its_share():
  random = np.random.default_rng(0)
  specs = _specs(is_scanned=True)
  params = {
    "attention": {
      name: jnp.asarray(random.normal(size=spec.shape), jnp.float32)
      for name, spec in specs["params"]["attention"].items()
    }
  }
  maxima = [
    [1.0, 20.0, 7.0, -3.0],
    [10.0, 2.0, 9.0, 40.0],
    [1.0, 2.0, 3.0, 4.0],
  ]
  clipped, metrics = qk_clip.QkClip(threshold=8.0).apply(
    {"params": params}, _maxima(maxima), specs=specs
  )
  old, new = params["attention"], clipped["params"]["attention"]
  x = random.normal(size=(2, EMBED))
  for i, row in enumerate(maxima):
    share = np.minimum(1, 8 / np.maximum(row, 1e-9))
    np.testing.assert_allclose(
      _logits(new, i, x), share * _logits(old, i, x), rtol=1e-5
    )
    # The query head with the largest logit and its keys share the factor.
    least = share.reshape(KEYS, -1).min(axis=1)
    np.testing.assert_allclose(
      new["key"][i],
      old["key"][i] * np.sqrt(least)[None, :, None],
      rtol=1e-5,
    )
  np.testing.assert_array_equal(new["value"], old["value"])
  np.testing.assert_array_equal(new["query"][2], old["query"][2])
  assert float(metrics["max_attention_logit"][0]) == 40.0
  assert float(metrics["clipped_heads"][0]) == pytest.approx(4 / 12)


def test_one_key_per_query_head_scales_both_by_the_root():
  specs = _specs(is_scanned=False, bias=False)
  shape = (EMBED, KEYS, WIDTH)
  specs["params"]["attention"]["query"] = testing.spec(
    "params/attention/query", shape, axes=("embed", "heads", "head_dim")
  )
  ones = {
    name: jnp.ones(shape, jnp.bfloat16) for name in ("query", "key", "value")
  }
  clipped, _ = qk_clip.QkClip(threshold=25.0).apply(
    {"params": {"attention": ones}}, _maxima([100.0, 5.0]), specs=specs
  )
  for name in ("query", "key"):
    value = clipped["params"]["attention"][name]
    assert value.dtype == jnp.bfloat16
    np.testing.assert_array_equal(value[:, 0], 0.5)
    np.testing.assert_array_equal(value[:, 1], 1.0)


def test_rejects():
  with pytest.raises(ValueError, match="threshold must be positive"):
    qk_clip.QkClip(threshold=0.0)
  clip = qk_clip.QkClip()
  with pytest.raises(ValueError, match=r"set max_logits=max_logits.MaxLogits"):
    clip.apply({"params": {}}, {}, specs={})
  specs = _specs(is_scanned=True, names=("combined", "other"))
  with pytest.raises(ValueError, match=r"params/attention has no query"):
    clip.apply({"params": {}}, _maxima(np.ones((3, 4))), specs=specs)
