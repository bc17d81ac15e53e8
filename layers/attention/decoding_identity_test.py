"""Decoding = forward, for every attention with every cache.

All layers run side by side in one module, so that there is one program for each
phase: prompts of several lengths in one batch, steps of one token, and a step
of two.
"""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import (
  head_norm,
  kernels,
  kv_cache,
  latent,
  position_bias,
  sequence_cache,
  sliding_cache,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import testing as attention_testing
from paxon.layers.norms import rms_norm
from paxon.layers.positions import rotary_embedding
from paxon.layers.quantizers import ngrammer, vector
from paxon.layers.recurrent import head_convolution

BATCH, EMBED, WINDOW = 2, 8, 3
# Of the prompts; then three steps of one token, and one of two.
LENGTHS, ONE_BY_ONE, TOTAL = (2, 5), 3, 10

_layer = functools.partial(
  attention_testing.grouped_query_attention, 4, num_kv_heads=2, head_dim=4
)
_rotated = functools.partial(_layer, rotary=rotary_embedding.Rotary())
_latent = functools.partial(
  latent.LatentAttention,
  num_heads=2,
  head_dim=3,
  rope_dim=4,
  value_dim=5,
  latent_dim=6,
  rotary=rotary_embedding.Rotary(),
  latent_norm=rms_norm.RmsNorm(),
)


def _layers():
  norms = {"query_norm": head_norm.HeadNorm(), "key_norm": head_norm.HeadNorm()}
  xl = position_bias.TransformerXlPosition(embed_dim=EMBED)
  ring = lambda: sliding_cache.SlidingCache(WINDOW)  # noqa: E731
  split = sequence_cache.SequenceCache
  return {
    "rotary": _rotated(),
    "rotary_split": _rotated(cache=split()),
    "window": _rotated(window=WINDOW),
    "window_ring": _rotated(window=WINDOW, cache=ring()),
    "window_split": _rotated(window=WINDOW, cache=split()),
    "chunk_ring": _rotated(chunk=WINDOW, cache=ring()),
    "norms": _rotated(**norms, after_rotary=True),
    "norms_ring": _rotated(**norms, window=2, cache=ring()),
    "alibi": _layer(position_bias=position_bias.Alibi()),
    "t5_ring": _layer(
      position_bias=position_bias.RelativeBias(num_buckets=4, max_distance=8),
      window=WINDOW,
      cache=ring(),
    ),
    "xl_split": _layer(relative_position=xl, cache=split()),
    "sinks_ring": _rotated(
      sinks=kernels.LearnedSinks(),
      logit_cap=3.0,
      use_bias=True,
      window=WINDOW,
      cache=ring(),
    ),
    "scale": _rotated(
      query_scale=head_norm.PerDimScale(),
      logit_scale=0.7,
      combined=True,
    ),
    "convolved": _rotated(convolution=head_convolution.HeadConvolution()),
    "convolved_ring": _rotated(
      convolution=head_convolution.HeadConvolution(2),
      window=WINDOW,
      cache=ring(),
    ),
    "ngrammer": _rotated(
      ngrammer=ngrammer.Ngrammer(
        num_heads=4,
        quantizer=vector.VectorQuantizer(5, 4),
        ngram_vocab_size=11,
        ngram_dim=2,
      )
    ),
    "latent": _latent(),
    "latent_ring": _latent(
      mask=attention_mask.MaskRules(window=WINDOW), cache=ring()
    ),
    "latent_split": _latent(cache=split()),
  }


class _All(nn.Module):
  """Gives what each layer makes of the same tokens."""

  layers: dict[str, nn.Module]

  @nn.compact
  def __call__(self, x, context):
    return {name: layer(x, context) for name, layer in self.layers.items()}


@dataclasses.dataclass(frozen=True)
class _Outcome:
  """What forward pass and decoding give at the same positions, [B,T,D]."""

  forward: np.ndarray
  decoded: np.ndarray


def _compiled(fn):
  # Large programs that run once.
  options = {"xla_backend_optimization_level": 0}
  return jax.jit(fn, compiler_options=options)


@functools.cache
def _outcomes():
  model = _All(_layers())
  x = testing.normal(BATCH, TOTAL, EMBED)
  positions, ones = (
    testing.make_positions(BATCH, TOTAL),
    testing.ones(BATCH, TOTAL),
  )
  args = testing.in_context(x, positions, ones)
  values = testing.random_values(model, *args)
  forward = _compiled(model.apply)(values, *args)

  width, lengths = max(LENGTHS), testing.array(LENGTHS, np.int32)
  inside = positions[:, :width] < lengths[:, None]
  prompt = (x[:, :width], positions[:, :width], inside.astype(jnp.int32))
  prefill = functools.partial(model.apply, mutable=["cache"])
  prompt = testing.in_context(*prompt, cache_length=TOTAL)
  y, state = _compiled(prefill)(values, *prompt)
  at = jnp.arange(width)[None]
  gathered = [(jnp.minimum(at, lengths[:, None] - 1), y)]
  step = _compiled(
    lambda v, *a: model.apply(v, *testing.in_context(*a), mutable=["cache"])
  )
  first = lengths[:, None]
  for count in (1,) * ONE_BY_ONE + (2,):
    at = first + jnp.arange(count)[None]
    tokens = jnp.take_along_axis(x, at[..., None], axis=1)
    y, state = step({**values, **state}, tokens, at, testing.ones(BATCH, count))
    gathered.append((at, y))
    first += count

  def outcome(name):
    pairs = []
    for i, (at, y) in enumerate(gathered):
      want = jnp.take_along_axis(forward[name], at[..., None], axis=1)
      got = (
        jnp.take_along_axis(y[name], at[..., None], axis=1)
        if not i
        else (y[name])
      )
      pairs.append((want, got))
    return _Outcome(
      *(np.concatenate(p, axis=1) for p in zip(*pairs, strict=True))
    )

  return {name: outcome(name) for name in forward}


@pytest.mark.nightly(keep=10)
@pytest.mark.parametrize("name", _layers())
def test_decoding_gives_what_the_forward_pass_gives(name):
  outcome = _outcomes()[name]
  # Not all alike: each token gathered something of its own.
  assert np.std(outcome.forward, axis=1).min() > 1e-3
  np.testing.assert_allclose(
    outcome.decoded, outcome.forward, rtol=1e-5, atol=2e-6
  )


def test_a_layer_without_a_cache_sees_one_step_only():
  layer = _rotated(cache=kv_cache.NoCache())
  args = (
    testing.normal(BATCH, 3, EMBED),
    testing.make_positions(BATCH, 3),
    testing.ones(BATCH, 3),
  )
  values = testing.random_values(layer, *testing.in_context(*args))
  _, state = testing.apply(
    layer, values, *testing.in_context(*args, cache_length=5), mutable=["cache"]
  )
  assert not state
  last = [a[:, 2:] for a in args]
  y = testing.apply(
    layer, values, *testing.in_context(*last), mutable=["cache"]
  )[0]
  # A token that sees itself gathers its own value.
  params = values["params"]
  own = jnp.repeat(jnp.einsum("BTD,DKH->BTKH", last[0], params["value"]), 2, 2)
  expected = jnp.einsum("BTNH,NHD->BTD", own, params["out"])
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
