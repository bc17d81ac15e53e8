"""Tests for samples that share the cache of their prompt."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import (
  kernels,
  kv_cache,
  latent,
  position_bias,
  quantized_rows,
  sequence_cache,
  sliding_cache,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import testing as attention_testing
from paxon.layers.decoding import (
  beam_search,
  cache_rows,
  generate,
  model_steps,
  prompts,
  samplers,
)
from paxon.layers.models import testing as models_testing
from paxon.layers.positions import rotary_embedding
from paxon.layers.stacks import stack
from paxon.sharding import axes, layout, mesh

BATCH, SAMPLES, EMBED, STEPS = 2, 3, 8, 3
LENGTHS = (2, 5)


def _copy(cache, count, *, length):
  del length
  return cache_rows.repeat(cache, count)


def _layers():
  layer = functools.partial(
    attention_testing.grouped_query_attention, 4, num_kv_heads=2, head_dim=4
  )
  rotated = functools.partial(layer, rotary=rotary_embedding.Rotary())
  return {
    "rotary": rotated(),
    "window": rotated(window=3),
    "ring": rotated(window=3, cache=sliding_cache.SlidingCache(3)),
    "split": rotated(window=4, cache=sequence_cache.SequenceCache()),
    "alibi": layer(position_bias=position_bias.Alibi()),
    "sinks": rotated(sinks=kernels.LearnedSinks(), logit_cap=3.0),
    "int8": rotated(
      cache=kv_cache.ContiguousCache(quantized_rows.QuantizedRows("int8"))
    ),
    "other_kernel": rotated(kernel=kernels.fused),
    "latent": latent.LatentAttention(
      num_heads=2,
      head_dim=3,
      rope_dim=4,
      value_dim=5,
      latent_dim=6,
      rotary=rotary_embedding.Rotary(),
    ),
    "stacked": stack.Stack((rotated(), rotated(window=3)), num_layers=4),
  }


class _All(nn.Module):
  layers: dict[str, nn.Module]

  @nn.compact
  def __call__(self, x, context):
    return {name: layer(x, context) for name, layer in self.layers.items()}


@functools.cache
def _outputs(jit=jax.jit, names=None):
  """Outputs of each layer's steps with a shared and with a copied cache."""
  layers = _layers()
  model, width = _All({name: layers[name] for name in names or layers}), 8
  x = testing.normal(BATCH, width, EMBED)
  positions = testing.make_positions(BATCH, width)
  lengths = testing.array(LENGTHS, np.int32)
  inside = (positions < lengths[:, None]).astype(jnp.int32)
  values = testing.random_values(model, *testing.in_context(x))
  tokens = testing.normal(STEPS, BATCH * SAMPLES, 1, EMBED, seed=3)

  def decode(values, x, tokens, repeat):
    args = testing.in_context(x, positions, inside, cache_length=width + STEPS)
    _, cache = model.apply(values, *args, mutable=["cache"])
    cache, found = repeat(cache, SAMPLES, length=width), []
    for i in range(STEPS):
      at = jnp.repeat(lengths, SAMPLES)[:, None] + i
      y, cache = model.apply(
        {**values, **cache},
        *testing.in_context(tokens[i], at, jnp.ones_like(at)),
        mutable=["cache"],
      )
      found.append(y)
    return found

  return [
    jax.device_get(
      jit(functools.partial(decode, repeat=repeat))(values, x, tokens)
    )
    for repeat in (cache_rows.share, _copy)
  ]


@pytest.mark.parametrize("name", _layers())
def test_a_layer_gives_what_it_gives_with_a_copied_cache(name):
  for shared, copied in zip(*_outputs(), strict=True):
    assert np.ptp(copied[name][:SAMPLES], axis=0).min() > 1e-4
    np.testing.assert_allclose(shared[name], copied[name], rtol=1e-5, atol=2e-6)


def test_slots_that_are_split_over_devices_are_shared():
  spec = mesh.MeshSpec.parse("data=2,sequence=4")
  laid = layout.Layout(mesh.make_mesh(spec))
  shared, copied = _outputs(laid.jit, ("split",))
  for one, two in zip(shared, copied, strict=True):
    np.testing.assert_allclose(one["split"], two["split"], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("kernel", [kernels.plain, kernels.auto])
def test_parts_give_the_softmax_over_all_slots(kernel, num_kv_heads):
  """Compared with float64; copies of the shared keys hold NaN."""
  query = testing.normal(BATCH * SAMPLES, 2, 4, EMBED)
  shared, own = (
    [testing.normal(rows, length, num_kv_heads, EMBED, seed=s) for s in (1, 2)]
    for rows, length in ((BATCH, 5), (BATCH * SAMPLES, 3))
  )
  at = testing.make_positions(BATCH * SAMPLES, 8)
  mask = attention_mask.AttentionMask(
    q_positions=at[:, 5:7],
    kv_positions=at,
    q_segment_ids=jnp.ones_like(at[:, 5:7]),
    kv_segment_ids=jnp.ones_like(at),
    rules=attention_mask.MaskRules(),
  )
  unused = jnp.full((BATCH * SAMPLES, 8, num_kv_heads, EMBED), jnp.nan)
  got = kernels.call(
    kernel, query, unused, unused, mask, parts=(tuple(shared), tuple(own))
  )
  key, value = (
    np.repeat(
      np.concatenate([np.repeat(x, SAMPLES, axis=0), y], axis=1),
      4 // num_kv_heads,
      axis=2,
    ).astype(np.float64)
    for x, y in zip(shared, own, strict=True)
  )
  logits = np.einsum("BTNH,BSNH->BNTS", np.asarray(query, np.float64), key)
  visible = np.arange(8)[None] <= np.arange(5, 7)[:, None]
  weights = np.where(visible, np.exp(logits * EMBED**-0.5), 0)
  weights /= weights.sum(axis=-1, keepdims=True)
  expected = np.einsum("BNTS,BSNH->BTNH", weights, value)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@functools.cache
def _model():
  model = models_testing.tiny_decoder()
  batch = models_testing.packed_batch([[3, 4]], length=8)
  return model, testing.random_values(model, batch, method="loss")


def _compile(repeat, *, search=None, num_samples=12, width=64):
  """Returns the compiled generation of samples, and its result."""
  model, values = _model()
  ids = jax.random.randint(jax.random.key(2), (BATCH, width), 1, 9)
  settings = {"max_new_tokens": 4, "num_samples": num_samples}
  settings["repeat"] = repeat

  def run(values, ids):
    steps = (
      model_steps.make_prefill(model, values),
      model_steps.make_decode_step(model, values),
    )
    lengths = jnp.asarray([width - 3, width], jnp.int32)
    if search is not None:
      return search.generate(*steps, ids, lengths, end_id=0, **settings)
    sampler, key = samplers.Temperature(temperature=3.0), jax.random.key(0)
    return generate.generate(
      *steps, ids, lengths, sampler=sampler, key=key, **settings
    )

  compiled = jax.jit(run).lower(values, ids).compile()
  return compiled, compiled(values, ids)


@pytest.mark.parametrize(
  "search",
  [None, beam_search.BeamSearch(beam_size=12)],
  ids=["samples", "beams"],
)
def test_sharing_changes_no_id_and_needs_less_memory(search):
  shared, got = _compile(cache_rows.share, search=search)
  copied, expected = _compile(_copy, search=search)
  np.testing.assert_array_equal(got.ids, expected.ids)
  assert len({tuple(ids) for ids in got.ids[:SAMPLES].tolist()}) > 1
  np.testing.assert_allclose(
    got.log_probs, expected.log_probs, rtol=1e-4, atol=1e-5
  )
  sizes = [x.memory_analysis().temp_size_in_bytes for x in (shared, copied)]
  # Keys and values of three layers: 64 slots of two heads, 4 wide, in float32.
  copies = (12 - 1) * BATCH * 3 * 2 * 64 * 2 * 4 * 4
  assert sizes[1] - sizes[0] > 0.5 * copies
  # Nor is the cache of one layer copied for a moment.
  joined = f"[{BATCH * 12},2,67,4]"
  assert joined in copied.as_text()
  assert joined not in shared.as_text()


def test_a_memory_is_stored_once():
  """Samples of an encoder-decoder are as many sequences with that source."""
  model = models_testing.tiny_transformer()
  batch = models_testing.paired_batch([[(3, 2)], [(4, 4)]], source=5, length=4)
  values = testing.random_values(model, batch, method="loss")
  source = {k: x for k, x in batch.items() if k.startswith("encoder_")}
  names = []

  def run(source, num_samples):
    size = source["encoder_inputs"].shape[0]

    def repeat(cache, count, *, length):
      cache = cache_rows.share(cache, count, length=length)
      cache_rows.map_axis(
        cache, axes.BATCH, lambda x, axis: names.append(x.shape[axis]) or x
      )
      return cache

    return generate.generate(
      model_steps.make_prefill(model, values, **source),
      model_steps.make_decode_step(model, values),
      jnp.ones((size, 1), jnp.int32),
      jnp.ones((size,), jnp.int32),
      sampler=samplers.Temperature(temperature=3.0),
      key=jax.random.key(0),
      max_new_tokens=4,
      num_samples=num_samples,
      repeat=repeat,
    )

  run = jax.jit(run, static_argnums=1)
  shared = run(source, 2)
  assert set(names) == {2 * len(batch["inputs"])}
  rows = {name: jnp.repeat(x, 2, axis=0) for name, x in source.items()}
  np.testing.assert_array_equal(shared.ids, run(rows, 1).ids)


def test_rejects_a_cache_without_axes():
  cache = {"cache": {"key": jnp.zeros((2, 3))}}
  with pytest.raises(ValueError, match=r"\['key'\] does not name its axes"):
    cache_rows.share(cache, 2, length=1)


def test_prompts_of_one_new_token_have_no_step():
  batch = prompts.pad_right([[1, 2, 3], [4]])
  model, values = _model()
  result = generate.generate(
    model_steps.make_prefill(model, values),
    model_steps.make_decode_step(model, values),
    jnp.asarray(batch.ids),
    jnp.asarray(batch.lengths),
    sampler=samplers.Temperature(),
    key=jax.random.key(0),
    max_new_tokens=1,
    num_samples=2,
  )
  assert result.lengths.tolist() == [1] * 4
