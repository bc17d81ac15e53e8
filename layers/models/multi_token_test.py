"""Tests of multi-token prediction against its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, feed_forward, unembedding
from paxon.layers.attention import grouped_query
from paxon.layers.models import decoder_lm, multi_token, pre_norm_decoder
from paxon.layers.models import testing as models_testing
from paxon.layers.moe import balance, experts, mixture, routers
from paxon.layers.norms import rms_norm
from paxon.layers.stacks import block, stack
from paxon.sharding import variables as variables_lib

V, D, H, F = models_testing.VOCAB, 8, 4, 12
WEIGHT = 0.3
# Documents of 5, 3 and 1 tokens and padding; one of 7, with a masked target.
BATCH = models_testing.packed_batch([[5, 3, 1], [7]], 10)
BATCH["weights"] = BATCH["weights"].at[1, 3].set(0.0).at[0, 2].set(0.5)


def _layer(mixed=False):
  ffn = feed_forward.GatedFeedForward(F)
  if mixed:
    ffn = mixture.MixtureOfExperts(
      4,
      routers.TopK(k=2),
      experts.GatedExperts(F),
      losses=(balance.switch(0.01),),
    )
  return block.TransformerBlock(
    rms_norm.RmsNorm(),
    grouped_query.GroupedQueryAttention(2, num_kv_heads=2, head_dim=H),
    rms_norm.RmsNorm(),
    ffn,
  )


def _model(depth=2, mixed=False, weight=WEIGHT, scan=True):
  def layers(number):
    return stack.Stack((_layer(mixed),), num_layers=number, scan=scan)

  further = None
  if depth:
    further = multi_token.compose(
      pre_norm_decoder.build,
      embed_dim=D,
      norm=rms_norm.RmsNorm,
      stack=functools.partial(layers, 1),
      num_depths=depth,
      weight=weight,
    )
  return decoder_lm.DecoderLm(
    embedding.Embedding(V, embed_dim=D),
    layers(1),
    rms_norm.RmsNorm(),
    head=unembedding.Unembedding(V),
    multi_token=further,
  )


@functools.cache
def _variables(mixed=False):
  args = models_testing.token_args(BATCH)
  made = jax.jit(_model(mixed=mixed).init)(jax.random.key(0), *args)
  made = variables_lib.unbox(made)
  # Norms are ones otherwise.
  return jax.tree.map(
    lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
    made,
  )


@functools.partial(jax.jit, static_argnames=("mixed", "depth", "training"))
def _loss(variables, batch, mixed=False, depth=2, training=True):
  model = _model(depth, mixed)
  return model.apply(
    variables,
    batch,
    deterministic=not training,
    method="loss",
    mutable=["auxiliary_losses"],
  )[0]


def _norm(x, scale):
  return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale["scale"]


def _block(p, x):
  """One pre-norm layer on one document [T,D]."""
  a = _norm(x, p["attention_norm"])
  for n in range(2):
    q, k, v = (a @ p["attention"][w][:, n] for w in ("query", "key", "value"))
    scores = q @ k.T / np.sqrt(H)
    scores = np.where(np.tri(len(x)) > 0, scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    x = x + e / e.sum(-1, keepdims=True) @ v @ p["attention"]["out"][n]
  a, f = _norm(x, p["feed_forward_norm"]), p["feed_forward"]
  gate = a @ f["gate"]
  return x + (gate / (1 + np.exp(-gate)) * (a @ f["up"])) @ f["down"]


def _nll(p, x, targets):
  logits = x @ p["head"]["kernel"]
  top = logits.max(-1, keepdims=True)
  logits = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
  return -logits[np.arange(len(x)), targets]


def _witness(p, batch, depth=2):
  """Sums of the loss, and of each further token, one document at a time."""
  table = p["embedding"]["table"]
  blocks = p["stack"]["layers"]["blocks_0"]
  main, sums = 0.0, np.zeros(depth)
  batch = {name: np.asarray(x) for name, x in batch.items()}
  for row in range(len(batch["inputs"])):
    for segment in set(batch["segment_ids"][row]) - {0}:
      at = batch["segment_ids"][row] == segment
      tokens, targets = batch["inputs"][row, at], batch["targets"][row, at]
      weights = batch["weights"][row, at].astype(np.float64)
      x = table[tokens]
      x = _block(jax.tree.map(lambda leaf: leaf[0], blocks), x)
      x = _norm(x, p["final_norm"])
      main += np.sum(weights * _nll(p, x, targets))
      for k in range(1, depth + 1):
        if len(tokens) <= k:
          break
        m = p["multi_token"][f"depths_{k - 1}"]
        inner = m["stack"]["layers"]["blocks_0"]
        x = np.concatenate(
          [
            _norm(table[tokens[k:]], m["embedding_norm"]),
            _norm(x[: len(tokens) - k], m["hidden_norm"]),
          ],
          axis=-1,
        )
        x = x @ m["projection"]["kernel"]
        x = _block(jax.tree.map(lambda leaf: leaf[0], inner), x)
        nll = _nll(p, _norm(x, m["final_norm"]), targets[k:])
        sums[k - 1] += np.sum(weights[k:] * nll)
  return main, sums


def _wide(variables):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])


def test_loss_equals_the_definition():
  (total, weight), metrics, _ = _loss(_variables(), BATCH)
  main, sums = _witness(_wide(_variables()), BATCH)
  np.testing.assert_allclose(total, main + WEIGHT * sums.mean(), rtol=1e-5)
  np.testing.assert_allclose(weight, np.sum(BATCH["weights"]), rtol=1e-6)
  for k in (1, 2):
    found, count = metrics[f"multi_token_log_pplx_{k}"]
    np.testing.assert_allclose(found, sums[k - 1], rtol=1e-5)
    later = np.asarray(BATCH["weights"])[:, k:]
    segments = np.asarray(BATCH["segment_ids"])
    same = segments[:, k:] == segments[:, :-k]
    np.testing.assert_allclose(count, np.sum(later * same), rtol=1e-6)
  np.testing.assert_allclose(metrics["log_pplx"][0], main, rtol=1e-5)


def test_gradient_equals_the_definition():
  """By a central difference in a random direction, in float64."""
  made = _variables()
  grads = jax.jit(jax.grad(lambda v: _loss(v, BATCH)[0][0]))(made)["params"]
  random = np.random.default_rng(0)
  params = _wide(made)
  way = jax.tree.map(lambda x: random.normal(size=x.shape), params)

  def moved(step):
    main, sums = _witness(
      jax.tree.map(lambda x, d: x + step * d, params, way), BATCH
    )
    return main + WEIGHT * sums.mean()

  expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
  found = sum(
    np.sum(np.asarray(g, np.float64) * d)
    for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(way), strict=True)
  )
  np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_evaluation_is_that_of_the_model():
  made = _variables()
  plain = {"params": dict(made["params"])}
  del plain["params"]["multi_token"]
  (found, _), metrics, _ = _loss(made, BATCH, training=False)
  (expected, _), others, _ = _loss(plain, BATCH, depth=0, training=False)
  assert found == expected
  assert metrics.keys() == others.keys()


@pytest.mark.nightly
def test_documents_do_not_see_each_other():
  """A mixture, too: other tokens change no choice."""
  made, other = _variables(mixed=True), dict(BATCH)
  at = BATCH["segment_ids"] == 2
  for name in ("inputs", "targets"):
    other[name] = jnp.where(at, (BATCH[name] + 3) % V, BATCH[name])
  other["weights"] = jnp.where(at, 0, BATCH["weights"])
  first = {**BATCH, "weights": other["weights"]}
  a, b = (_loss(made, batch, True)[1] for batch in (first, other))
  for name in ("multi_token_log_pplx_1", "multi_token_log_pplx_2"):
    np.testing.assert_allclose(a[name], b[name], rtol=1e-6)


def test_layers_of_the_modules_balance_experts():
  losses = [
    _loss(_variables(mixed=True), BATCH, True, depth)[1] for depth in (0, 2)
  ]
  keys = [key for key in losses[0] if key.startswith("auxiliary_loss/")]
  assert keys
  assert all(losses[1][key][0] > losses[0][key][0] for key in keys)


def test_scanned_equals_unrolled():
  made = _variables()
  apply = jax.jit(
    functools.partial(
      _model(scan=False).apply, deterministic=False, method="loss"
    )
  )
  np.testing.assert_allclose(
    apply(made, BATCH)[0][0], _loss(made, BATCH)[0][0], rtol=1e-6
  )


def test_bad_fields_are_errors():
  with pytest.raises(ValueError, match=r"depths must not be empty"):
    multi_token.MultiTokenPrediction(depths=())
  (module,) = _model(depth=1).multi_token.depths
  with pytest.raises(ValueError, match=r"weight must not be negative"):
    multi_token.MultiTokenPrediction(depths=(module,), weight=-1.0)
  batch = {**BATCH, "prefix": BATCH["segment_ids"] > 0}
  with pytest.raises(ValueError, match=r"does not support a prefix"):
    _model().apply(_variables(), batch, deterministic=False, method="loss")
