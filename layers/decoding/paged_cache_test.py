"""A paged cache = a contiguous one, for every layer and storage."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers import testing
from paxon.layers.attention import (
  kv_cache,
  latent,
  paged_slots,
  quantized_rows,
  sliding_cache,
)
from paxon.layers.attention import testing as attention_testing
from paxon.layers.decoding import cache_rows
from paxon.layers.norms import rms_norm
from paxon.layers.positions import rotary_embedding

BATCH, EMBED, LENGTH, PAGE = 3, 8, 11, 4

_read, _write = jax.jit(paged_slots.read), jax.jit(paged_slots.write)


def _layers():
  storages = {
    "as_is": kv_cache.AsIs(),
    "int8": quantized_rows.QuantizedRows("int8"),
  }
  caches = {name: kv_cache.ContiguousCache(s) for name, s in storages.items()}
  caches["ring"] = sliding_cache.SlidingCache(3)
  layers = {
    name: attention_testing.grouped_query_attention(
      4,
      num_kv_heads=2,
      head_dim=4,
      window=3 if name == "ring" else None,
      rotary=rotary_embedding.Rotary(),
      cache=cache,
    )
    for name, cache in caches.items()
  }
  layers["latent"] = latent.LatentAttention(
    num_heads=2,
    head_dim=3,
    rope_dim=4,
    value_dim=5,
    latent_dim=6,
    rotary=rotary_embedding.Rotary(),
    latent_norm=rms_norm.RmsNorm(),
  )
  return layers


class _SideBySide(nn.Module):
  layers: dict[str, nn.Module]

  @nn.compact
  def __call__(self, *args, **kwargs):
    return {n: x.copy(name=n)(*args, **kwargs) for n, x in self.layers.items()}


def _arguments(rng, counts, width):
  """Returns tokens, of which each sequence has a number."""
  x = jnp.asarray(rng.normal(size=(BATCH, width, EMBED)), jnp.float32)
  inside = np.arange(width)[None] < np.asarray(counts)[:, None]
  return x, jnp.asarray(inside, jnp.int32)


def test_pages_hold_what_slots_do():
  """The same bits; attention rounds as XLA has compiled it."""
  rng = np.random.default_rng(0)
  model = _SideBySide(_layers())
  zeros = jnp.zeros((BATCH, 1), jnp.int32)
  first = jnp.zeros((BATCH, 1, EMBED))
  values = testing.random_values(model, first)
  args = testing.in_context(first, zeros, zeros, cache_length=LENGTH)
  _, state = testing.apply(model, values, *args, mutable=["cache"])
  whole = jax.tree.map(jnp.zeros_like, cache_rows.with_row_index(state))
  paged = paged_slots.with_pages(whole, num_pages=9, length=PAGE)
  assert not paged_slots.is_paged(paged)
  del whole["cache"]["ring"], paged["cache"]["ring"]
  assert paged_slots.is_paged(paged)
  model = _SideBySide({n: x for n, x in _layers().items() if n != "ring"})
  del values["params"]["ring"]
  key = paged["cache"]["int8"]["cache"]["key_scale"]
  assert key.value.shape == (10, 2, PAGE)
  # Whatever pages hold before, even NaN, is not read.
  paged = jax.tree.map(
    lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x, paged
  )
  table = jnp.asarray([[9, 2, 4], [1, 7, 3], [5, 8, 6]], jnp.int32)
  paged = paged_slots.with_table(paged, table)

  @jax.jit
  def step(cache, x, positions, segments):
    args = testing.in_context(x, positions, segments)
    return model.apply({**values, **cache}, *args, mutable=["cache"])

  length = np.zeros(BATCH, np.int32)
  for counts, width in (
    ((5, 2, 0), 5),
    ((1, 1, 1), 1),
    ((1, 0, 1), 1),
    ((1, 5, 3), 5),
    ((1, 1, 1), 1),
  ):
    x, segments = _arguments(rng, counts, width)
    positions = jnp.asarray(length[:, None] + np.arange(width)[None], jnp.int32)
    expected, whole = step(whole, x, positions, segments)
    got, paged = step(paged, x, positions, segments)
    real = np.asarray(segments) != 0
    for name, y in expected.items():
      np.testing.assert_allclose(
        np.asarray(got[name])[real],
        np.asarray(y)[real],
        rtol=1e-5,
        atol=1e-6,
        err_msg=name,
      )
    for name, slots in whole["cache"].items():
      pages = paged["cache"][name]["cache"]
      for variable, box in slots["cache"].items():
        found = pages[variable].value
        if variable not in ("positions", "segment_ids", "index"):
          where = pages["pages"].value, pages["segment_ids"].value
          found = _read(found[None], jnp.int32(0), *where)
        np.testing.assert_array_equal(found, box.value, err_msg=name)
    length += np.asarray(counts)
  np.testing.assert_array_equal(
    paged["cache"]["as_is"]["cache"]["index"].value, length
  )


def test_tokens_go_to_the_slots_of_their_pages():
  """Against the definition."""
  rng = np.random.default_rng(1)
  pages = np.asarray([[3, 1], [2, 4]], np.int32)
  slots = np.asarray([[0, 5, -1], [7, -1, 2]], np.int32)
  for shape in ((), (2,), (2, 3)):
    heads = shape[:1]
    pool = rng.normal(size=(2, 5, *heads, PAGE, *shape[1:])).astype(np.float32)
    new = rng.normal(size=(2, *heads, 3, *shape[1:])).astype(np.float32)
    got = _write(
      jnp.asarray(pool),
      jnp.asarray(new),
      jnp.int32(1),
      jnp.asarray(pages),
      jnp.asarray(slots),
    )
    expected, axis = pool.copy(), len(heads)
    for b, t in np.ndindex(2, 3):
      if slots[b, t] >= 0:
        page = expected[1, pages[b, slots[b, t] // PAGE]]
        token = np.take(new[b], t, axis=axis)
        np.moveaxis(page, axis, 0)[slots[b, t] % PAGE] = token
    np.testing.assert_array_equal(got[0], pool[0])
    np.testing.assert_array_equal(got[1, 1:], expected[1, 1:])
    segments = np.asarray([[1] * 6, [0, 1, 1, 0, 1, 1]], np.int32)
    read = _read(got, jnp.int32(1), jnp.asarray(pages), jnp.asarray(segments))
    for b, s in np.ndindex(2, 6):
      token = np.take(expected[1, pages[b, s // PAGE]], s % PAGE, axis=axis)
      np.testing.assert_array_equal(
        np.take(np.asarray(read)[b], s, axis=axis), token * segments[b, s]
      )
