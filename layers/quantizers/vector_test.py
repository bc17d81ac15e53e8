"""Tests for codebooks, against float64 numpy from the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.norms import batch_norm
from paxon.layers.quantizers import codes, vector
from paxon.sharding import layout, mesh

STATS = batch_norm.COLLECTION
GROUPS, CODES, EMBED = 2, 5, 6
X = testing.normal(2, 7, EMBED)
MASK = testing.array([[1] * 7, [1] * 4 + [0] * 3], bool)
# Padding may be anything.
PADDED = jnp.where(MASK[..., None], X, jnp.nan)


def _unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _oracle(x, book, *, normalize_input, normalize_codebook):
  """Returns inputs, entries and ids of one position and group at a time."""
  z = np.asarray(x, np.float64).reshape(*x.shape[:2], len(book), -1)
  book = np.asarray(book, np.float64)
  z = _unit(z) if normalize_input else z
  book = _unit(book) if normalize_codebook else book
  ids = np.zeros(z.shape[:3], int)
  values = np.zeros_like(z)
  for at in np.ndindex(ids.shape):
    ids[at] = np.argmin(((z[at] - book[at[2]]) ** 2).sum(axis=-1))
    values[at] = book[at[2], ids[at]]
  return z, values, ids


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "padded"])
@pytest.mark.parametrize("normalized", [(True, True), (False, False), (0, 1)])
@pytest.mark.parametrize("kind", ["gradient", "ema"])
def test_codes_are_the_nearest_entries(kind, normalized, mask):
  fields = {
    "normalize_input": bool(normalized[0]),
    "normalize_codebook": bool(normalized[1]),
  }
  make = (
    vector.VectorQuantizer if kind == "gradient" else vector.EmaVectorQuantizer
  )
  layer = make(CODES, GROUPS, beta=0.3, **fields)
  values = testing.random_values(layer, X)
  if kind == "gradient":
    book = values["params"]["codebook"]
  else:
    values = {
      STATS: {**values[STATS], "count": jnp.abs(values[STATS]["count"])}
    }
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), values[STATS])
    whole = wide["count"].sum(axis=1, keepdims=True)
    smooth = (wide["count"] + 1e-5) / (whole + CODES * 1e-5) * whole
    book = wide["total"] / smooth[..., None]
  z, entries, ids = _oracle(X, book, **fields)
  kept = np.ones((2, 7), bool) if mask is None else np.asarray(mask)
  found = testing.apply(layer, values, X if mask is None else PADDED, mask)
  flat = np.where(kept[..., None], entries.reshape(2, 7, -1), 0)
  np.testing.assert_allclose(found.values, flat, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(found.ids, np.where(kept[..., None], ids, 0))
  squares = ((z - entries) ** 2).sum(axis=(2, 3))[kept]
  terms = 0.3 + (kind == "gradient")
  np.testing.assert_allclose(found.loss, terms * squares.mean(), rtol=1e-5)


def test_gradients_pass_straight_and_move_codes_to_vectors():
  """Of sum(values * w) and of the loss, by hand."""
  layer = vector.VectorQuantizer(
    CODES, beta=0.3, normalize_input=False, normalize_codebook=False
  )
  values = testing.random_values(layer, X)
  w = testing.normal(*X.shape, seed=3)

  def total(params, x):
    found = layer.apply({"params": params}, x, MASK)
    return jnp.sum(found.values * w) + found.loss

  of_book, of_x = jax.jit(jax.grad(total, argnums=(0, 1)))(values["params"], X)
  book = np.asarray(values["params"]["codebook"], np.float64)
  z, entries, ids = _oracle(
    X, book, normalize_input=False, normalize_codebook=False
  )
  kept = np.asarray(MASK)
  difference = (z - entries)[:, :, 0] * kept[..., None] / kept.sum()
  expected = np.asarray(w) * kept[..., None] + 0.3 * 2 * difference
  np.testing.assert_allclose(of_x, expected, rtol=1e-4, atol=1e-6)
  moved = np.zeros_like(book)
  for b, t in zip(*np.nonzero(kept), strict=True):
    moved[0, ids[b, t, 0]] -= 2 * difference[b, t]
  np.testing.assert_allclose(of_book["codebook"], moved, rtol=1e-4, atol=1e-6)


def test_averages_move_to_the_vectors_that_chose_them():
  layer = vector.EmaVectorQuantizer(
    CODES, GROUPS, decay=0.9, normalize_input=False, normalize_codebook=False
  )
  values = testing.initial_values(layer, X)
  run = functools.partial(
    testing.apply, layer, deterministic=False, mutable=[STATS]
  )
  found, state = run(values, PADDED, MASK)
  z = np.asarray(X, np.float64).reshape(2, 7, GROUPS, -1)
  count, total = (
    np.array(values[STATS][name], np.float64) for name in ("count", "total")
  )
  count, total = 0.9 * count, 0.9 * total
  for b, t in zip(*np.nonzero(np.asarray(MASK)), strict=True):
    for g in range(GROUPS):
      number = int(found.ids[b, t, g])
      count[g, number] += 0.1
      total[g, number] += 0.1 * z[b, t, g]
  np.testing.assert_allclose(state[STATS]["count"], count, rtol=1e-5)
  np.testing.assert_allclose(state[STATS]["total"], total, rtol=1e-4, atol=1e-6)
  # Evaluation changes nothing.
  _, same = testing.apply(layer, values, X, MASK, mutable=[STATS])
  np.testing.assert_array_equal(same[STATS]["count"], values[STATS]["count"])
  # Many steps make the entries the means of clusters.
  centers = np.asarray([[3.0, 0], [-3, 0], [0, 3]])
  rng = np.random.default_rng(0)
  at = rng.integers(0, 3, (1, 300))
  data = jnp.asarray(
    centers[at] + 0.1 * rng.normal(size=(1, 300, 2)), jnp.float32
  )
  layer = vector.EmaVectorQuantizer(
    3, decay=0.8, normalize_input=False, normalize_codebook=False
  )
  state = {STATS: {"count": jnp.ones((1, 3)), "total": data[:, :3] * 0.5}}
  state[STATS]["total"] = jnp.asarray([[[1.0, 0], [-1, 0], [0, 1]]])
  run = functools.partial(
    testing.apply, layer, deterministic=False, mutable=[STATS]
  )
  for _ in range(40):
    found, state = run(state, data)
  np.testing.assert_array_equal(found.ids[0, :, 0], at[0])
  means = [np.asarray(data)[at == i].mean(axis=0) for i in range(3)]
  entries = state[STATS]["total"] / state[STATS]["count"][..., None]
  np.testing.assert_allclose(entries[0], means, rtol=1e-2, atol=1e-2)


def test_sharded_averages_are_those_of_the_whole_batch():
  layer = vector.EmaVectorQuantizer(CODES, GROUPS)
  x = testing.normal(8, 3, EMBED)
  values = testing.initial_values(layer, x)

  def step(values, x):
    return layer.apply(values, x, deterministic=False, mutable=[STATS])

  expected = jax.jit(step)(values, x)
  where = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse("data=2,fsdp=4")))
  split = where.batch_sharding(3)
  compiled = where.jit(step, in_shardings=(where.replicated, split))
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
    compiled(values, testing.place(x, split)),
    expected,
  )


def test_residuals_are_quantized_one_after_another():
  make = functools.partial(
    vector.VectorQuantizer,
    CODES,
    normalize_input=False,
    normalize_codebook=False,
  )
  layer = vector.ResidualQuantizer([make(), make(), make()])
  values = testing.random_values(layer, X)
  found = testing.apply(layer, values, PADDED, MASK)
  rest, kept = np.asarray(X, np.float64), np.asarray(MASK)
  loss, ids, total = 0, [], np.zeros_like(rest)
  for i in range(3):
    book = values["params"][f"quantizers_{i}"]["codebook"]
    z, entries, number = _oracle(
      rest, book, normalize_input=False, normalize_codebook=False
    )
    loss += 1.25 * ((z - entries) ** 2).sum(axis=(2, 3))[kept].mean()
    rest = rest - entries[:, :, 0]
    total += entries[:, :, 0]
    ids.append(number)
  np.testing.assert_array_equal(
    found.ids, np.where(kept[..., None], np.concatenate(ids, axis=-1), 0)
  )
  expected = np.where(kept[..., None], total, 0)
  np.testing.assert_allclose(found.values, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(found.loss, loss, rtol=1e-4)
  gradient = jax.jit(
    jax.grad(lambda x: jnp.sum(layer.apply(values, x, MASK).values))
  )(X)
  np.testing.assert_array_equal(
    gradient, np.broadcast_to(kept[..., None], X.shape)
  )


@pytest.mark.parametrize("normalize", [True, False])
def test_random_projections_are_fixed_targets(normalize):
  layer = vector.RandomProjectionQuantizer(
    CODES, projection_dim=3, num_groups=2, normalize=normalize
  )
  values = testing.initial_values(layer, X)
  assert not values.get("params")
  found, state = testing.apply(
    layer, values, PADDED, MASK, deterministic=False, mutable=[STATS]
  )
  jax.tree.map(np.testing.assert_array_equal, state[STATS], values[STATS])
  wide = jax.tree.map(lambda x: np.asarray(x, np.float64), values[STATS])
  projected = np.asarray(X, np.float64) @ wide["projection"]
  _, _, ids = _oracle(
    projected,
    wide["codebook"],
    normalize_input=normalize,
    normalize_codebook=normalize,
  )
  kept = np.asarray(MASK)[..., None]
  np.testing.assert_array_equal(found.ids, np.where(kept, ids, 0))
  assert found.loss == 0
  assert len(np.unique(ids)) > 2


def test_usage_is_that_of_real_positions():
  ids = testing.array([[[0, 3], [0, 1], [2, 3], [9, 9]]], np.int32)
  mask = testing.array([[1, 1, 1, 0]], bool)
  found = codes.usage(ids, mask, num_codes=4)
  first = -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))
  np.testing.assert_allclose(found.entropy, first, rtol=1e-6)
  np.testing.assert_allclose(found.perplexity, np.exp(first), rtol=1e-6)
  np.testing.assert_allclose(found.coverage, 0.5)
  even = codes.usage(testing.array([[[0], [1], [2]]], np.int32), num_codes=3)
  np.testing.assert_allclose(even.perplexity, 3, rtol=1e-6)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: vector.VectorQuantizer(0), r"VectorQuantizer.num_codes must be"),
    (lambda: vector.VectorQuantizer(2, beta=-1.0), r"beta must .* got -1.0"),
    (
      lambda: vector.EmaVectorQuantizer(2, decay=2.0),
      r"decay must be in \[0, 1",
    ),
    (lambda: vector.ResidualQuantizer([]), r"quantizers must not be empty"),
    (
      lambda: vector.ResidualQuantizer([vector.VectorQuantizer(2)]),
      r"quantizers\[0\].normalize_input is True",
    ),
  ],
)
def test_rejects_wrong_fields(make, message):
  with pytest.raises(ValueError, match=message):
    make()
  with pytest.raises(ValueError, match=r"num_groups \(4\) must divide the 6"):
    vector.VectorQuantizer(2, 4).init(jax.random.key(0), X)
