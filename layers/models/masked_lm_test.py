"""Tests for the masked language model: numbers, types, masks, errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.models import random_masking
from paxon.layers.models import testing as models_testing

BATCH = models_testing.packed_batch([[5, 2], [4]], 7)
ARGS = models_testing.token_args(BATCH)
TYPES = testing.array([[0, 0, 1, 1, 1, 0, 1], [0] * 7], jnp.int32)
MODEL = models_testing.tiny_bert()
_forward = jax.jit(MODEL.apply)


@pytest.fixture(name="values", scope="module")
def _values():
  return testing.random_values(MODEL, *ARGS)


def _norm(p, x):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)
  return x * p["scale"] + p["bias"]


def _gelu(x):
  """The approximation by tanh, as `jax.nn.gelu`."""
  return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _numpy_row(params, ids, at, seg, types):
  """One row of BERT, from its paper, in float64 numpy."""
  x = params["embedding"]["table"][ids]
  x = x + params["type_embedding"]["table"][types]
  x = x + params["position_embedding"]["table"][at]
  x = _norm(params["embedding_norm"], x)
  for i in range(2):
    p = jax.tree.map(lambda a, i=i: a[i], params["stack"]["layers"]["blocks_0"])
    a, out = p["attention"], np.zeros_like(x)
    for n in range(4):
      query, key, value = (
        x @ a[name][:, n] + a[name + "_bias"][n]
        for name in ("query", "key", "value")
      )
      for t in range(len(x)):
        seen = [s for s in range(len(x)) if seg[s] == seg[t] != 0]
        if seen:
          share = np.exp(key[seen] @ query[t] / 2)
          out[t] += share / share.sum() @ value[seen] @ a["out"][n]
    x = _norm(p["attention_norm"], x + out + a["out_bias"])
    f = p["feed_forward"]
    hidden = _gelu(x @ f["up"] + f["up_bias"])
    x = _norm(p["feed_forward_norm"], x + hidden @ f["down"] + f["down_bias"])
  dense, norm = params["transform"]["dense"], params["transform"]["norm"]
  x = _norm(norm, _gelu(x @ dense["kernel"] + dense["bias"]))
  return x @ params["embedding"]["table"].T + params["embedding"]["bias"]


def test_logits_match_numpy(values):
  wide = jax.tree.map(lambda p: np.asarray(p, np.float64), values["params"])
  rows = zip(*(np.asarray(a) for a in (*ARGS, TYPES)), strict=True)
  expected = np.stack([_numpy_row(wide, *row) for row in rows])
  actual = _forward(values, *ARGS, TYPES)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
  # Without types, all tokens are of type 0.
  np.testing.assert_allclose(
    _forward(values, *ARGS, 0 * TYPES),
    _forward(values, *ARGS),
    rtol=1e-5,
    atol=1e-5,
  )


def test_the_loss_counts_hidden_tokens_only(values):
  weights = BATCH["weights"] * testing.array([0, 1, 0, 0, 1, 0, 1.0])[None]
  batch = {**BATCH, "weights": weights, "type_ids": TYPES}
  loss, metrics, outputs = testing.apply(MODEL, values, batch, method="loss")
  log_probs = jax.nn.log_softmax(_forward(values, *ARGS, TYPES))
  nll = -np.take_along_axis(log_probs, BATCH["targets"][:, :, None], 2)[..., 0]
  np.testing.assert_allclose(
    loss, (np.sum(nll * weights), np.sum(weights)), rtol=1e-5
  )
  np.testing.assert_allclose(metrics["log_pplx"], loss, rtol=1e-6)
  np.testing.assert_array_equal(outputs["token_weights"], weights)


def test_masking_in_the_step_is_masking_before_it(values):
  masking = random_masking.RandomMasking(
    mask_id=3, vocab_size=models_testing.VOCAB, rate=0.5
  )
  model = MODEL.clone(masking=masking)
  batch = {k: v for k, v in BATCH.items() if k != "targets"}
  key = jax.random.key(3)

  @jax.jit
  def masked_in_the_step(key):
    rngs = {random_masking.STREAM: key}
    return model.apply(
      values, batch, deterministic=False, method="loss", rngs=rngs
    )

  loss, _, outputs = masked_in_the_step(key)
  before = {
    **batch,
    "inputs": outputs["inputs"],
    "targets": BATCH["inputs"],
    "weights": outputs["token_weights"],
  }
  assert np.any(before["inputs"] != BATCH["inputs"])
  expected = testing.apply(MODEL, values, before, method="loss")[0]
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  other = masked_in_the_step(jax.random.key(4))[2]
  assert np.any(other["inputs"] != outputs["inputs"])
  # Evaluation needs no key, and hides the same tokens every time.

  @jax.jit
  def evaluated():
    return [
      model.apply(values, batch, method="loss")[2]["inputs"] for _ in range(2)
    ]

  first, again = evaluated()
  np.testing.assert_array_equal(first, again)


def test_gradients_are_finite_and_reach_every_parameter(values):
  batch = {**BATCH, "type_ids": TYPES}
  loss = lambda v: MODEL.apply(v, batch, method="loss")[0][0]  # noqa: E731
  gradients = jax.jit(jax.grad(loss))(values)
  for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
    assert np.all(np.isfinite(gradient)), path
    assert np.any(gradient), path


def test_says_what_it_needs(values):
  batch = {k: v for k, v in BATCH.items() if k != "targets"}
  with pytest.raises(ValueError, match=r"MaskedLm.loss needs batch\['targets'"):
    MODEL.apply(values, batch, method="loss")
  with pytest.raises(ValueError, match=r"MaskedLm.type_embedding is None"):
    MODEL.clone(type_embedding=None).apply(values, *ARGS, TYPES)
