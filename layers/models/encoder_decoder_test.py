"""Tests for encoder-decoders: numbers, packing, decoding, sources, shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.decoding import generate, model_steps, samplers
from paxon.layers.models import testing as models_testing
from paxon.sharding import layout, mesh

# Two packed pairs; one pair with much padding; a target without a source.
BATCH = models_testing.paired_batch(
  [[(3, 4), (2, 2)], [(5, 6)], [(0, 3)]], source=6, length=7
)
ARGS = models_testing.paired_args(BATCH)
MODELS = {
  "t5": models_testing.tiny_t5(),
  "post-norm": models_testing.tiny_transformer(),
}


@pytest.fixture(name="model", params=MODELS, scope="module")
def _model(request):
  """A model, its values, and its compiled forward pass."""
  model = MODELS[request.param]
  return model, testing.random_values(model, *ARGS), jax.jit(model.apply)


def _softmax(x):
  weights = np.exp(x - x.max())
  return weights / weights.sum()


def _norm(p, x):
  """Layer norm where there is a bias, root mean square norm else."""
  if "bias" not in p:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * p["scale"]
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)
  return x * p["scale"] + p["bias"]


def _bucket(distance, *, bidirectional):
  """T5's bucket of `query - key`, of 8 buckets up to a distance of 16."""
  count = 4 if bidirectional else 8
  first = count if bidirectional and distance < 0 else 0
  distance = abs(distance) if bidirectional else max(distance, 0)
  if distance < count // 2:
    return first + distance
  along = np.log(distance / (count // 2)) / np.log(16 / (count // 2))
  return first + min(int(count // 2 + along * (count - count // 2)), count - 1)


def _attention(p, x, memory, visible, *, scale, bias):
  """Attention of `x` to `memory`, a pair of positions at a time."""
  out = np.zeros_like(x)
  num_heads = p["query"].shape[1]

  def head(name, y, n):
    extra = p[name + "_bias"][n] if name + "_bias" in p else 0.0
    return y @ p[name][:, n] + extra

  for n in range(num_heads):
    k = n // (num_heads // p["key"].shape[1])
    query, key = head("query", x, n), head("key", memory, k)
    value = head("value", memory, k)
    for t in range(len(x)):
      seen = [s for s in range(len(memory)) if visible(t, s)]
      if seen:
        logits = key[seen] @ query[t] * scale
        logits += np.asarray([bias(t, s, n) for s in seen])
        out[t] += _softmax(logits) @ value[seen] @ p["out"][n]
  return out + p.get("out_bias", 0.0)


def _mlp(p, x):
  hidden = np.maximum(x @ p["up"] + p.get("up_bias", 0.0), 0)
  return hidden @ p["down"] + p.get("down_bias", 0.0)


def _sinusoids(at, width):
  rate = 10_000.0 ** (-np.arange(width // 2) / (width // 2 - 1))
  angle = at[:, None] * rate[None]
  return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


def _layer(stack, i):
  return jax.tree.map(lambda a: a[i], stack["layers"]["blocks_0"])


def _numpy_row(values, row):
  """One row of the model, from the two papers, in float64 numpy."""
  params, tables = values["params"], values.get("shared", {})
  is_t5 = bool(tables)
  ids, at, seg, source_ids, source_at, source_seg = row
  embed = params["embedding"]["table"]
  source_embed = params.get("encoder_embedding", {}).get("table", embed)
  scale = 1.0 if is_t5 else 0.5

  def added(norm, branch):
    """A residual, with its norm before the branch or after it."""
    return lambda x: (
      x + branch(_norm(norm, x)) if is_t5 else _norm(norm, x + branch(x))
    )

  def self_attention(p, at, seg, *, causal):
    table = tables.get("decoder_bias" if causal else "encoder_bias")

    def bias(t, s, n):
      if table is None:
        return 0.0
      bucket = _bucket(int(at[t] - at[s]), bidirectional=not causal)
      return table["table"][bucket, n]

    def visible(t, s):
      return seg[t] == seg[s] != 0 and not (causal and at[s] > at[t])

    return lambda x: _attention(p, x, x, visible, scale=scale, bias=bias)

  def cross_attention(p, memory):
    def visible(t, s):
      return seg[t] == source_seg[s] != 0

    return lambda x: _attention(
      p, x, memory, visible, scale=scale, bias=lambda t, s, n: 0.0
    )

  x = source_embed[source_ids]
  x = x if is_t5 else x + _sinusoids(source_at, x.shape[-1])
  for i in range(2):
    p = _layer(params["encoder"], i)
    attend = self_attention(p["attention"], source_at, source_seg, causal=False)
    x = added(p["attention_norm"], attend)(x)
    x = added(p["feed_forward_norm"], lambda y: _mlp(p["feed_forward"], y))(x)  # noqa: B023
  memory = _norm(params["encoder_norm"], x) if is_t5 else x

  x = embed[ids]
  x = x if is_t5 else x + _sinusoids(at, x.shape[-1])
  for i in range(2):
    p = _layer(params["decoder"], i)
    attend = self_attention(p["self_attention"], at, seg, causal=True)
    x = added(p["self_attention_norm"], attend)(x)
    attend = cross_attention(p["cross_attention"], memory)
    x = added(p["cross_attention_norm"], attend)(x)
    x = added(p["feed_forward_norm"], lambda y: _mlp(p["feed_forward"], y))(x)  # noqa: B023
  x = _norm(params["decoder_norm"], x) if is_t5 else x
  if "head" in params:
    return x @ params["head"]["kernel"]
  return x * x.shape[-1] ** -0.5 @ embed.T


def test_logits_match_numpy(model):
  _, values, forward = model
  wide = jax.tree.map(lambda p: np.asarray(p, np.float64), values)
  rows = zip(*(np.asarray(a) for a in ARGS), strict=True)
  expected = np.stack([_numpy_row(wide, row) for row in rows])
  actual = forward(values, *ARGS)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_packed_pairs_are_separate_pairs(model):
  """One row for each pair, in the shapes of the packed batch."""
  _, values, forward = model
  together = forward(values, *ARGS)[0]
  pairs = [(slice(0, 3), slice(0, 4)), (slice(3, 5), slice(4, 6))]
  moved = [np.zeros_like(a) for a in ARGS]
  for row, pair in enumerate(pairs):
    for i, (new, old) in enumerate(zip(moved, ARGS, strict=True)):
      inside = pair[1] if i < 3 else pair[0]
      values_of = np.asarray(old)[0, inside]
      new[row, : len(values_of)] = values_of
  alone = forward(values, *moved)
  for row, (_, inside) in enumerate(pairs):
    np.testing.assert_allclose(
      together[inside],
      alone[row, : inside.stop - inside.start],
      rtol=1e-5,
      atol=1e-5,
    )


def test_scanned_is_unrolled(model):
  model, values, forward = model
  stacks = {
    side: getattr(model, side).clone(scan=False)
    for side in ("encoder", "decoder")
  }
  np.testing.assert_allclose(
    testing.apply(model.clone(**stacks), values, *ARGS),
    forward(values, *ARGS),
    rtol=1e-5,
    atol=1e-5,
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_gradients_are_finite_and_reach_every_parameter(tied):
  model = models_testing.tiny_t5(tied=tied)
  values = testing.random_values(model, *ARGS)
  loss = lambda v: model.apply(v, BATCH, method="loss")[0][0]  # noqa: E731
  gradients = jax.jit(jax.grad(loss))(values)
  for gradient in jax.tree.leaves(gradients):
    assert np.all(np.isfinite(gradient))
    assert np.any(np.asarray(gradient))


@pytest.mark.nightly(keep=1)
def test_steps_give_the_forward_pass(model):
  """Sources of several lengths; one token a step."""
  model, values, forward = model
  prompt, end = 3, 6
  lengths = testing.array([5, 2, 0], np.int32)[:, None]
  targets = [a[1:2].repeat(3, axis=0) for a in ARGS[:3]]
  at = testing.make_positions(3, 6)
  sources = [
    jnp.tile(ARGS[3][1:2], (3, 1)),
    at,
    (at < lengths).astype(jnp.int32),
  ]
  logits, state = testing.apply(
    model,
    values,
    *(a[:, :prompt] for a in targets),
    **dict(zip(_SOURCE, sources, strict=True)),
    cache_length=6,
    method="prefill",
    mutable=["cache"],
  )
  # The encoder has run, once: steps need nothing of it.
  kept = {**values, "params": dict(values["params"])}
  del kept["params"]["encoder"]
  step = jax.jit(
    lambda v, *a: model.apply(v, *a, method="decode_step", mutable=["cache"])
  )
  outputs = [logits]
  for i in range(prompt, end):
    logits, state = step({**kept, **state}, *(a[:, i : i + 1] for a in targets))
    outputs.append(logits)
  np.testing.assert_allclose(
    jnp.concatenate(outputs, axis=1),
    forward(values, *targets, *sources)[:, :end],
    rtol=1e-5,
    atol=1e-5,
  )


_SOURCE = ("encoder_inputs", "encoder_positions", "encoder_segment_ids")


def test_generation_reads_the_source_and_continues_each_sample():
  """Greedy ids are those of the forward pass; two samples, one prefill."""
  model = models_testing.tiny_transformer()
  values = testing.random_values(model, *ARGS)
  sources = {name: BATCH[name][:2] for name in _SOURCE}

  @jax.jit
  def run(prompts, lengths):
    return generate.generate(
      model_steps.make_prefill(model, values, **sources),
      model_steps.make_decode_step(model, values),
      prompts,
      lengths,
      sampler=samplers.Greedy(),
      key=jax.random.key(0),
      max_new_tokens=3,
      num_samples=2,
    )

  start = testing.array([[1], [1]], jnp.int32)
  result = run(start, np.ones(2, np.int32))
  ids, found = np.asarray(result.ids), np.asarray(result.log_probs)
  forward = jax.jit(model.apply)
  # One padded width, so that one compilation serves all steps.
  text = np.zeros((2, 3), np.int32)
  text[:, 0] = 1
  for i in range(3):
    tokens = text, testing.make_positions(2, 3), testing.ones(2, 3)
    logits = np.asarray(forward(values, *tokens, *sources.values()))[:, i]
    best = np.argmax(logits, axis=-1)
    for sample in (slice(0, 4, 2), slice(1, 4, 2)):
      np.testing.assert_array_equal(ids[sample, i], best)
    log_probs = jax.nn.log_softmax(logits)[np.arange(2), best]
    np.testing.assert_allclose(found[::2, i], log_probs, rtol=1e-4, atol=1e-5)
    text[:, i + 1 : i + 2] = best[:, None]


def test_what_stands_in_the_padding_of_a_source_has_no_influence(model):
  _, values, forward = model
  dirty = jnp.where(ARGS[5] == 0, 9, ARGS[3])
  before = forward(values, *ARGS)
  after = forward(values, *ARGS[:3], dirty, *ARGS[4:])
  np.testing.assert_array_equal(before, after)


def test_a_batch_without_a_source_trains_the_decoder_alone():
  """As rows whose source is padding, where attention has no bias."""
  model = models_testing.tiny_t5()
  values = testing.random_values(model, *ARGS)
  alone = {k: v for k, v in BATCH.items() if not k.startswith("encoder_")}
  with pytest.raises(
    ValueError, match=r"EncoderDecoder needs batch\['encoder_inputs'\]"
  ):
    model.apply(values, alone, method="loss")
  optional = model.clone(source_optional=True)
  empty = {**BATCH, "encoder_segment_ids": 0 * BATCH["encoder_segment_ids"]}
  expected = testing.apply(model, values, empty, method="loss")
  actual = testing.apply(optional, values, alone, method="loss")
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-6), actual, expected
  )
  del alone["inputs"]
  part = {**alone, "encoder_inputs": BATCH["encoder_inputs"]}
  with pytest.raises(ValueError, match=r"batch\['encoder_positions'\]"):
    optional.apply(values, part, method="loss")


def test_scores_of_packed_pairs_are_those_of_each_alone():
  model = models_testing.tiny_t5()
  values = testing.random_values(model, *ARGS)
  scores = testing.apply(model, values, BATCH, method="score")
  alone = {
    name: x[:1, 3:5] if name.startswith("encoder_") else x[:1, 4:6]
    for name, x in BATCH.items()
  }
  outputs = testing.apply(model, values, alone, method="loss")[2]
  np.testing.assert_array_equal(scores.length[0, :3], [4, 2, 0])
  np.testing.assert_allclose(
    scores.log_likelihood[0, 1], -np.sum(outputs["token_nll"]), rtol=1e-5
  )


def test_methods_say_what_they_need():
  model = models_testing.tiny_t5()
  values = testing.random_values(model, *ARGS)
  source = dict(zip(_SOURCE, ARGS[3:], strict=True))
  with pytest.raises(
    ValueError, match=r'EncoderDecoder.prefill .*mutable=\["cache"\]'
  ):
    model.apply(values, *ARGS[:3], **source, cache_length=9, method="prefill")
  with pytest.raises(
    ValueError, match=r"EncoderDecoder\.decode_step needs the"
  ):
    model.apply(values, *ARGS[:3], method="decode_step", mutable=["cache"])
  with pytest.raises(ValueError, match=r"EncoderDecoder.logit_cap must be"):
    model.clone(logit_cap=-1.0)


@pytest.mark.parametrize("text", ["data=2,fsdp=2,tensor=2"])
def test_sharded_equals_unsharded(text):
  model = models_testing.tiny_t5()
  batch = models_testing.paired_batch(
    [[(6, 3), (2, 5)], [(8, 8)], [(4, 6)], [(3, 2), (5, 5)]],
    source=8,
    length=8,
  )

  def gradient(values, batch):
    def loss(values):
      total, weight = model.apply(values, batch, method="loss")[0]
      return total / weight

    return jax.value_and_grad(loss)(values)

  specs = testing.specs(model, batch, method="loss")
  values = testing.random_values(model, batch, method="loss")
  expected = jax.jit(gradient)(values, batch)
  where = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse(text)))
  shardings = where.shardings(specs)
  jitted = where.jit(
    gradient,
    in_shardings=(shardings, {k: where.batch_sharding(2) for k in batch}),
    out_shardings=(where.replicated, shardings),
  )
  compiled = jitted.lower(values, batch).compile()
  placed = testing.place((values, batch), compiled.input_shardings[0])
  actual = compiled(*placed)
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6),
    actual[1],
    expected[1],
  )
