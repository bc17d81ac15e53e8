"""Tests for the decoder language model: numbers, losses, packing, axes."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, remat, testing
from paxon.layers.attention import kernels
from paxon.layers.losses import softmax_loss
from paxon.layers.models import decoder_lm
from paxon.layers.models import testing as models_testing
from paxon.layers.positions import position_embedding
from paxon.layers.stacks import shared

BATCH = models_testing.packed_batch([[5, 2], [4], [7]], 7)
ARGS = models_testing.token_args(BATCH)
WINDOWS = (3, None)


def _numpy_model(values, inputs, positions, segments):
  """The whole model from its papers, in float64 numpy.

  Pre-norm RMSNorm, half-split rotary embedding, grouped-query attention with
  alternating windows, SwiGLU, tied or separate head. One row at a time; the
  matrices of a row are its positions by features.
  """
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), values["params"])

  def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

  def rotate(x, at):
    half = x.shape[-1] // 2
    angle = at[:, None] * 10_000.0 ** (-np.arange(half) / half)[None]
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
      [
        a * np.cos(angle) - b * np.sin(angle),
        b * np.cos(angle) + a * np.sin(angle),
      ],
      axis=-1,
    )

  def attention(p, x, at, segment, window):
    out = np.zeros_like(x)
    length, num_heads = len(x), p["query"].shape[1]
    for n in range(num_heads):
      k = n // (num_heads // p["key"].shape[1])
      query = rotate(x @ p["query"][:, n], at)
      key = rotate(x @ p["key"][:, k], at)
      value = x @ p["value"][:, k]
      for t in range(length):
        seen = [
          s
          for s in range(t + 1)
          if segment[s] == segment[t] != 0
          and (window is None or t - s < window)
        ]
        if seen:
          share = np.exp(key[seen] @ query[t] / np.sqrt(query.shape[-1]))
          out[t] += (share / share.sum()) @ value[seen] @ p["out"][n]
    return out

  def layer(i):
    group, slot = divmod(i, len(WINDOWS))
    stacked = params["stack"]["layers"][f"blocks_{slot}"]
    single = params["stack"].get(f"layers_{i}")
    return single or jax.tree.map(lambda x: x[group], stacked)

  logits = []
  for ids, at, segment in zip(
    *(np.asarray(a) for a in (inputs, positions, segments)), strict=True
  ):
    x = params["embedding"]["table"][ids]
    for i in range(3):
      p = layer(i)
      normed = norm(x, p["attention_norm"]["scale"])
      x = x + attention(p["attention"], normed, at, segment, WINDOWS[i % 2])
      normed = norm(x, p["feed_forward_norm"]["scale"])
      gate = normed @ p["feed_forward"]["gate"]
      hidden = gate / (1 + np.exp(-gate)) * (normed @ p["feed_forward"]["up"])
      x = x + hidden @ p["feed_forward"]["down"]
    x = norm(x, params["final_norm"]["scale"])
    head = params.get("head", {}).get("kernel", params["embedding"]["table"].T)
    logits.append(x @ head)
  return np.stack(logits)


@functools.cache
def _model(**fields):
  """A model, its values, and its forward pass, compiled once a shape."""
  model = models_testing.tiny_decoder(**fields)
  return model, testing.random_values(model, *ARGS), jax.jit(model.apply)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_logits_match_numpy(tied):
  _, values, forward = _model(tied=tied)
  logits = forward(values, *ARGS)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(
    logits, _numpy_model(values, *ARGS), rtol=1e-4, atol=1e-4
  )


def test_first_values_give_the_numpy_logits_too():
  model, _, forward = _model(tied=True)
  values = testing.initial_values(model, *ARGS)
  np.testing.assert_allclose(
    forward(values, *ARGS),
    _numpy_model(values, *ARGS),
    rtol=1e-4,
    atol=1e-4,
  )


def test_loss_and_metrics_match_numpy():
  model, values, _ = _model(tied=True)
  weights = np.array(BATCH["weights"])
  weights[2, 3] = 0.5
  loss, metrics, outputs = testing.apply(
    model, values, {**BATCH, "weights": weights}, method="loss"
  )
  outputs = jax.device_get(outputs)
  logits = _numpy_model(values, *ARGS)
  total = hits = 0.0
  for b, t in np.ndindex(weights.shape):
    target = int(BATCH["targets"][b, t])
    nll = np.log(np.exp(logits[b, t]).sum()) - logits[b, t, target]
    np.testing.assert_allclose(outputs["token_nll"][b, t], nll, rtol=1e-4)
    total += float(weights[b, t]) * nll
    hits += float(weights[b, t]) * (np.argmax(logits[b, t]) == target)
  rows = np.sum(outputs["token_nll"] * weights, axis=1)
  np.testing.assert_allclose(outputs["row_nll"], rows, rtol=1e-5)
  np.testing.assert_array_equal(outputs["row_weight"], [7, 4, 6.5])
  np.testing.assert_allclose(np.sum(outputs["row_hits"]), hits, rtol=1e-6)
  assert set(outputs["token_hits"].ravel().tolist()) <= {0.0, 1.0}
  expected = {"log_pplx": total, "accuracy": hits}
  assert set(metrics) == set(expected)
  for name, value in expected.items():
    assert metrics[name][0].dtype == metrics[name][1].dtype == jnp.float32
    np.testing.assert_allclose(metrics[name], (value, 17.5), rtol=1e-4)
  np.testing.assert_allclose(loss, (total, 17.5), rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_chunks_of_the_loss_change_nothing(tied):
  one, several = (
    models_testing.tiny_decoder(tied=tied, num_layers=1).clone(
      token_loss=softmax_loss.SoftmaxLoss(chunk_length=length)
    )
    for length in (None, 3)
  )
  values = testing.random_values(one, *ARGS)
  assert testing.specs(one, BATCH, method="loss") == testing.specs(
    several, BATCH, method="loss"
  )

  def gradient(model):
    loss = lambda v: model.apply(v, BATCH, method="loss")[0][0]  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(values)

  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
    gradient(several),
    gradient(one),
  )


def test_a_shared_embedding_is_head_and_table():
  """Chunks of the loss, gradient and names as those of the tied model."""
  tied = models_testing.tiny_decoder(num_layers=1).clone(
    token_loss=softmax_loss.SoftmaxLoss(chunk_length=3)
  )
  table = embedding.Embedding(
    models_testing.VOCAB, embed_dim=models_testing.EMBED
  )
  model = tied.clone(embedding=shared.shared("ids", table))
  values = testing.random_values(tied, *ARGS)
  own = dict(values["params"])
  split = {"shared": {"ids": own.pop("embedding")}, "params": own}
  specs = testing.specs(model, BATCH, method="loss")
  assert specs["shared"]["ids"]["table"].name == "shared/ids/table"
  assert specs["shared"]["ids"]["table"].axes == ("vocab", "embed")

  def gradient(model, values):
    loss = lambda v: model.apply(v, BATCH, method="loss")[0][0]  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(values)

  expected, actual = gradient(tied, values), gradient(model, split)
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
  np.testing.assert_allclose(
    actual[1]["shared"]["ids"]["table"],
    expected[1]["params"]["embedding"]["table"],
    rtol=1e-5,
    atol=1e-6,
  )


def test_smoothing_and_z_loss_are_in_the_loss_and_not_in_log_pplx():
  plain = models_testing.tiny_decoder(num_layers=1)
  model = plain.clone(
    token_loss=softmax_loss.SoftmaxLoss(
      label_smoothing=0.1, z_loss_weight=0.01, chunk_length=4
    )
  )
  values = testing.random_values(model, *ARGS)
  before = testing.apply(plain, values, BATCH, method="loss")
  loss, metrics, _ = testing.apply(model, values, BATCH, method="loss")
  np.testing.assert_allclose(metrics["log_pplx"], before[0], rtol=1e-6)
  logits = np.asarray(testing.apply(model, values, *ARGS), np.float64)
  weights = np.asarray(BATCH["weights"])
  log_z = np.log(np.sum(np.exp(logits), axis=-1))
  z_loss = 0.01 * np.sum(log_z**2 * weights)
  np.testing.assert_allclose(metrics["z_loss"], (z_loss, 18), rtol=1e-5)
  uniform = np.sum((log_z - logits.mean(axis=-1)) * weights)
  expected = 0.9 * metrics["log_pplx"][0] + 0.1 * uniform + z_loss
  np.testing.assert_allclose(loss[0], expected, rtol=1e-5)


def test_the_logit_cap_is_in_logits_and_loss():
  plain = models_testing.tiny_decoder(num_layers=1)
  model = plain.clone(logit_cap=0.5)
  values = testing.random_values(model, *ARGS)
  logits = 0.5 * np.tanh(testing.apply(plain, values, *ARGS) / 0.5)
  np.testing.assert_allclose(
    testing.apply(model, values, *ARGS), logits, rtol=1e-5, atol=1e-6
  )
  outputs = testing.apply(model, values, BATCH, method="loss")[2]
  chosen = np.take_along_axis(logits, BATCH["targets"][:, :, None], axis=2)
  nll = jax.nn.logsumexp(logits, axis=-1) - chosen[:, :, 0]
  np.testing.assert_allclose(outputs["token_nll"], nll, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cap", [0.0, float("nan")])
def test_rejects_a_cap_that_is_not_positive(cap):
  with pytest.raises(ValueError, match=r"DecoderLm\.logit_cap must be"):
    models_testing.tiny_decoder().clone(logit_cap=cap)


@pytest.mark.parametrize(
  "model",
  [
    pytest.param(models_testing.tiny_decoder(), id="plain"),
    pytest.param(models_testing.tiny_decoder(kernel=kernels.fused), id="fused"),
    pytest.param(models_testing.tiny_gpt2(), id="absolute positions"),
  ],
)
def test_packed_documents_are_separate_documents(model):
  sizes, length = [3, 5, 2], 12
  packed = models_testing.packed_batch([sizes], length)
  args = models_testing.token_args(packed)
  # A document a row, and all of them in a last one: one shape is compiled.
  rows = [[np.zeros(length, np.int32) for _ in args] for _ in sizes]
  start = 0
  for row, size in zip(rows, sizes, strict=True):
    for own, given in zip(row, args, strict=True):
      own[:size] = np.asarray(given)[0, start : start + size]
    start += size
  rows.append([np.asarray(given[0]) for given in args])
  batch = [jax.device_put(np.stack(x)) for x in zip(*rows, strict=True)]
  values = testing.random_values(model, *batch)
  *alone, together = testing.apply(model, values, *batch)
  start = 0
  for row, size in zip(alone, sizes, strict=True):
    np.testing.assert_allclose(
      together[start : start + size], row[:size], rtol=1e-5, atol=1e-5
    )
    start += size


def test_gradient_of_packed_loss_is_the_sum_over_documents():
  model, values, _ = _model(tied=True)
  packed = models_testing.packed_batch([[3, 4]], 9)

  @jax.jit
  def gradient(values, batch):
    loss = lambda v: model.apply(v, batch, method="loss")[0][0]  # noqa: E731
    return jax.grad(loss)(values)

  def cut(a, b):
    """One document, at the start of a row that is padding behind it."""
    behind = ((0, 0), (0, 9 - (b - a)))
    return {
      name: np.pad(np.asarray(x)[:, a:b], behind) for name, x in packed.items()
    }

  parts = [gradient(values, cut(0, 3)), gradient(values, cut(3, 7))]
  jax.tree.map(
    lambda whole, *own: np.testing.assert_allclose(
      whole, sum(map(np.asarray, own)), rtol=1e-4, atol=1e-5
    ),
    gradient(values, packed),
    *parts,
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_gradients_of_the_loss_match_finite_differences(tied):
  model = models_testing.tiny_decoder(
    tied=tied, remat_policy=remat.save_nothing
  )
  values = testing.random_values(model, *ARGS)

  def loss(values):
    total, weight = model.apply(values, BATCH, method="loss")[0]
    return total / weight

  testing.assert_gradients_match(loss, values, has_rule=True)


def test_padding_has_no_influence():
  _, values, forward = _model(tied=True)
  inputs, positions, segments = ARGS
  is_padding = np.asarray(segments) == 0
  assert np.any(is_padding)
  other = jnp.where(is_padding, 9, inputs)
  before, after = (
    np.asarray(forward(values, ids, positions, segments))
    for ids in (inputs, other)
  )
  np.testing.assert_array_equal(before[~is_padding], after[~is_padding])
  assert np.all(np.isfinite(after))


def test_bfloat16_compute_keeps_float32_params_and_logits():
  model = models_testing.tiny_decoder(dtype=jnp.bfloat16)
  values = testing.random_values(model, *ARGS)
  assert {p.dtype for p in jax.tree.leaves(values)} == {jnp.dtype("float32")}
  logits = testing.apply(model, values, *ARGS)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(
    logits, _numpy_model(values, *ARGS), rtol=0.1, atol=0.15
  )
  gradient = jax.eval_shape(
    jax.grad(lambda v: model.apply(v, BATCH, method="loss")[0][0]), values
  )
  assert {g.dtype for g in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
  "model",
  [
    pytest.param(
      models_testing.tiny_decoder(
        dtype=jnp.bfloat16, remat_policy=remat.save_nothing
      ),
      id="tied, remat",
    ),
    pytest.param(
      models_testing.tiny_decoder(dtype=jnp.bfloat16, tied=False, scan=False),
      id="own head, unrolled",
    ),
    pytest.param(
      models_testing.tiny_gpt2(dtype=jnp.bfloat16).clone(
        token_loss=softmax_loss.SoftmaxLoss(chunk_length=2, z_loss_weight=1e-3)
      ),
      id="absolute positions, chunks",
    ),
  ],
)
def test_a_bfloat16_step_multiplies_bfloat16_only(model):
  """Forward, backward and update: no product has a float32 operand."""
  values = jax.eval_shape(lambda: testing.random_values(model, *ARGS))

  def step(values, batch):
    loss = lambda v: model.apply(v, batch, method="loss")[0][0]  # noqa: E731
    gradient = jax.grad(loss)(values)
    return jax.tree.map(lambda v, g: v - 0.1 * g, values, gradient)

  dots = testing.dots(jax.make_jaxpr(step)(values, BATCH))
  narrow = jnp.dtype(jnp.bfloat16)
  assert {d.operands for d in dots} == {(narrow, narrow)}
  # Logits of the head and of attention, forward only.
  assert any(d.result == jnp.float32 for d in dots)


def test_dropout_needs_its_key_and_changes_the_loss():
  model = models_testing.tiny_decoder(dropout=nn.Dropout(0.3))
  values = testing.random_values(model, *ARGS)

  @jax.jit
  def loss(key):
    rngs = {"dropout": key}
    return model.apply(
      values, BATCH, deterministic=False, method="loss", rngs=rngs
    )[0][0]

  first, second = (float(loss(jax.random.key(i))) for i in range(2))
  assert first != second
  assert first == float(loss(jax.random.key(0)))


def test_names_and_axes():
  axes = testing.axes(models_testing.tiny_decoder(tied=False), *ARGS)
  tops = {
    name: a for name, a in axes.items() if not name.startswith("params/stack/")
  }
  assert tops == {
    "params/embedding/table": ("vocab", "embed"),
    "params/final_norm/scale": ("embed",),
    "params/head/kernel": ("embed", "vocab"),
  }
  assert axes["params/stack/layers/blocks_1/attention/key"] == (
    "layers",
    "embed",
    "kv_heads",
    "head_dim",
  )


class Same(nn.Module):
  """Returns its input."""

  def __call__(self, x):
    return x


class Taken(nn.Module):
  """A stack that returns what it is given."""

  def __call__(self, x, context):
    del context
    return x


class Shown(nn.Module):
  """A stack that shows in its output what it was called with."""

  def __call__(self, x, context):
    shown = context.positions + 10 * context.segment_ids
    shown += 100 * context.cache_length + 1000 * int(context.deterministic)
    return x + shown[:, :, None].astype(x.dtype)


def test_parts_get_what_the_model_was_called_with():
  model = decoder_lm.DecoderLm(
    embedding=embedding.Embedding(8, embed_dim=4),
    stack=Shown(),
    final_norm=Same(),
    head=Same(),
  )
  ids = testing.array([[3, 1]], jnp.int32)
  positions, segments = testing.array([[[4, 5]], [[6, 7]]], jnp.int32)
  values = testing.random_values(
    model, ids, positions, segments, cache_length=2
  )
  table = values["params"]["embedding"]["table"]
  for deterministic in (True, False):
    y = model.apply(
      values,
      ids,
      positions,
      segments,
      cache_length=2,
      deterministic=deterministic,
    )
    extra = testing.array([[264.0, 275.0]]) + 1000.0 * deterministic
    np.testing.assert_allclose(y, table[ids] + extra[:, :, None], rtol=1e-6)


class Ones(nn.Module):
  """A position embedding that shows what it was called with."""

  def __call__(self, positions, embed_dim):
    return jnp.tile(positions.astype(jnp.float32)[:, :, None], embed_dim)


def test_positions_are_added_to_the_embedded_tokens():
  model = decoder_lm.DecoderLm(
    embedding=embedding.Embedding(8, embed_dim=4, dtype=jnp.bfloat16),
    stack=Taken(),
    final_norm=Same(),
    head=Same(),
    position_embedding=Ones(),
  )
  ids, positions = testing.array([[[3, 1, 1]], [[0, 1, 7]]], jnp.int32)
  values = testing.random_values(model, ids, positions, ids)
  table = np.asarray(values["params"]["embedding"]["table"], jnp.bfloat16)
  expected = table[ids] + np.asarray(positions, jnp.bfloat16)[:, :, None]
  y = model.apply(values, ids, positions, ids)
  np.testing.assert_array_equal(y, expected.astype(np.float32))


def test_sequences_longer_than_the_learned_positions_are_rejected():
  model = models_testing.tiny_gpt2(
    positions=position_embedding.LearnedPositions(6)
  )
  with pytest.raises(ValueError, match=r"max_length \(6\) .* length \(7\)"):
    testing.specs(model, *ARGS)


def test_names_of_a_model_with_absolute_positions():
  axes = testing.axes(models_testing.tiny_gpt2(), *ARGS)
  assert axes["params/position_embedding/table"] == (None, "embed")
  layer = "params/stack/layers/blocks_0"
  assert {n.removeprefix(layer) for n in axes if n.startswith(layer)} == {
    "/attention_norm/scale",
    "/attention_norm/bias",
    "/attention/qkv",
    "/attention/qkv_bias",
    "/attention/out",
    "/attention/out_bias",
    "/feed_forward_norm/scale",
    "/feed_forward_norm/bias",
    "/feed_forward/up",
    "/feed_forward/up_bias",
    "/feed_forward/down",
    "/feed_forward/down_bias",
  }


def test_equal_models_are_equal():
  for make in (models_testing.tiny_decoder, models_testing.tiny_gpt2):
    one, two = make(), make()
    assert one == two
    assert hash(one) == hash(two)


def test_prefill_and_decode_step_say_what_they_need():
  model, values, _ = _model(tied=True)
  with pytest.raises(ValueError, match=r'prefill .*mutable=\["cache"\]'):
    model.apply(values, *ARGS, cache_length=9, method="prefill")
  with pytest.raises(ValueError, match="needs the cache of prefill"):
    model.apply(values, *ARGS, method="decode_step", mutable=["cache"])
  _, state = jax.eval_shape(
    lambda values: model.apply(
      values, *ARGS, cache_length=9, method="prefill", mutable=["cache"]
    ),
    values,
  )
  with pytest.raises(ValueError, match="needs the cache of prefill"):
    model.apply({**values, **state}, *ARGS, method="decode_step")


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  "make", [models_testing.tiny_decoder, models_testing.tiny_gpt2]
)
def test_inputs_are_one_unpadded_document_by_default(make):
  model, inputs = make(), jnp.asarray([[5, 2, 9], [4, 1, 3]])
  variables = jax.jit(model.init)(jax.random.key(0), inputs)
  arrays = testing.make_positions(2, 3), testing.ones(2, 3)
  np.testing.assert_array_equal(
    testing.apply(model, variables, inputs),
    testing.apply(model, variables, inputs, *arrays),
  )
  _, cache = testing.apply(
    model, variables, inputs, cache_length=4, mutable=["cache"]
  )
  with pytest.raises(ValueError, match="DecoderLm needs `positions` while dec"):
    model.apply({**variables, **cache}, inputs[:, :1], mutable=["cache"])
