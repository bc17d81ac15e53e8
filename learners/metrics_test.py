"""Tests for weighted sums."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import metrics
from paxon.sharding import layout, mesh


def test_total_ignores_values_of_weight_zero():
  values = jax.device_put(np.float32([[1.0, 2.0], [3.0, 100.0]]))
  weights = jax.device_put(np.float32([[1.0, 0.5], [2.0, 0.0]]))
  value, weight = metrics.total(values, weights=weights)
  assert (float(value), float(weight)) == (8.0, 3.5)


def test_total_of_bfloat16_is_summed_in_float32():
  values = jnp.ones((1000,), jnp.bfloat16)
  value, weight = metrics.total(values, weights=values)
  # A bfloat16 sum would stop at 256.
  assert (float(value), float(weight)) == (1000.0, 1000.0)
  assert value.dtype == weight.dtype == jnp.float32


def test_mean_over_batches_is_the_mean_over_all_tokens():
  random = np.random.default_rng(0)
  values = random.normal(size=(5, 8)).astype(np.float32)
  weights = (random.random(size=(5, 8)) < 0.6).astype(np.float32)
  totals = metrics.Totals()
  for row, mask in zip(values, weights, strict=True):
    pair = metrics.total(jax.device_put(row), weights=jax.device_put(mask))
    totals.add({"loss": pair})
  expected = np.sum(values * weights, dtype=np.float64) / weights.sum()
  assert totals.means()["loss"] == pytest.approx(expected, rel=1e-6)
  assert totals.weight("loss") == weights.sum()


def test_mean_does_not_depend_on_the_order():
  random = np.random.default_rng(1)
  values = random.normal(size=1000) * 10.0 ** random.integers(-6, 6, 1000)
  pairs = [(jnp.float32(v), jnp.float32(1)) for v in values]
  forward, backward = metrics.Totals(), metrics.Totals()
  for pair in pairs:
    forward.add({"x": pair})
  for pair in reversed(pairs):
    backward.add({"x": pair})
  assert forward.means() == backward.means()


def test_scalar_counts_once():
  value, weight = metrics.scalar(jnp.bfloat16(0.5))
  assert (value.dtype, float(value)) == (jnp.float32, 0.5)
  assert float(weight) == 1.0


def test_zero_weight_has_no_mean():
  totals = metrics.Totals()
  totals.add({"x": (jnp.float32(0), jnp.float32(0))})
  assert totals.means() == {}
  assert totals.weight("never added") == 0.0


def test_infinities_of_both_signs_have_a_nan_mean():
  totals = metrics.Totals()
  for value in (math.inf, -math.inf, math.nan):
    totals.add({"x": (jnp.float32(value), jnp.float32(1))})
    totals.add({"y": (jnp.float32(math.inf), jnp.float32(1))})
  means = totals.means()
  assert math.isnan(means["x"])
  assert means["y"] == math.inf


def test_indexed_metric_is_reported_per_index():
  totals = metrics.Totals()
  name = f"layers/{metrics.make_indexed(1, 2)}/rms"
  for scale in (1.0, 3.0):
    values = scale * jax.device_put(np.float32([10.0, 20.0, 30.0]))
    totals.add({name: (values, jnp.float32(2))})
  assert totals.means() == {
    "layers/1/rms": 10.0,
    "layers/3/rms": 20.0,
    "layers/5/rms": 30.0,
  }


def test_each_dimension_has_a_placeholder():
  totals = metrics.Totals()
  name = f"a/{metrics.make_indexed(0, 1)}/b/{metrics.make_indexed(0, 2)}/x"
  values = jnp.arange(6.0).reshape(2, 3)
  totals.add({name: (values, jnp.float32(1))})
  assert totals.means() == {
    f"a/{i}/b/{2 * j}/x": 3.0 * i + j for i in range(2) for j in range(3)
  }


def _batch(weights, target_bytes):
  return {
    "weights": jax.device_put(np.float32(weights)),
    "target_bytes": jax.device_put(np.int32(target_bytes)),
  }


def test_uniform_bytes_cost_eight_bits():
  batch = _batch(np.ones((2, 5)), np.ones((2, 5)))
  outputs = {"token_nll": jnp.full((2, 5), np.log(256), jnp.float32)}
  bits, source = metrics.bits_per_byte(batch, outputs)["bits_per_byte"]
  assert float(source) == 10
  assert float(bits) == pytest.approx(80.0, rel=1e-6)


def test_matches_numpy_with_padding_and_long_tokens():
  random = np.random.default_rng(0)
  nll = random.gamma(2.0, size=(3, 7)).astype(np.float32)
  weights = (random.random((3, 7)) < 0.7).astype(np.float32)
  lengths = random.integers(0, 6, size=(3, 7))
  pair = metrics.bits_per_byte(
    _batch(weights, lengths), {"token_nll": jax.device_put(nll)}
  )["bits_per_byte"]
  bits = np.sum(np.log2(np.exp(nll.astype(np.float64))) * weights)
  np.testing.assert_allclose(pair, (bits, np.sum(lengths * weights)), rtol=1e-6)


def test_end_of_document_has_bits_but_no_bytes():
  batch = _batch([[1, 1]], [[1, 0]])
  outputs = {"token_nll": jnp.full((1, 2), np.log(2), jnp.float32)}
  bits, source = metrics.bits_per_byte(batch, outputs)["bits_per_byte"]
  assert float(bits) == pytest.approx(2.0, rel=1e-6)
  assert float(source) == 1.0


def test_cut_tokens():
  batch = {
    "cut_tokens": jnp.asarray([[3, 0, 0, 0], [0, 0, 1, 0]]),
    "segment_ids": jnp.asarray([[1, 1, 2, 0], [1, 1, 2, 2]]),
    "positions": jnp.asarray([[0, 1, 0, 0], [0, 1, 0, 1]]),
  }
  found = metrics.cut_tokens(batch, {})
  # 4 of 11 tokens, and two of four examples.
  assert [float(x) for x in found["cut_tokens"]] == [4, 11]
  assert [float(x) for x in found["cut_chats"]] == [2, 4]
  assert metrics.cut_tokens({}, {}) == {}


def _weighted(seed):
  random = np.random.default_rng(seed)
  values = np.float32(random.normal(size=(8, 6)))
  weights = np.float32(random.integers(0, 3, size=(8, 6)))
  return values, weights


def _measure(values, weights):
  return {
    **metrics.maximum("x", values, weights=weights),
    **metrics.histogram(
      "x", values, weights=weights, low=-1.0, high=1.0, bins=4
    ),
    "mean": metrics.total(values, weights=weights),
  }


def _expected(batches):
  values, weights = (
    np.concatenate([b[i].reshape(-1) for b in batches]).astype(np.float64)
    for i in (0, 1)
  )
  edges = [-np.inf, -0.5, 0.0, 0.5, np.inf]
  counts, _ = np.histogram(values, edges, weights=weights)
  return (
    values[weights != 0].max(),
    counts,
    np.sum(values * weights),
    np.sum(values**2 * weights),
  )


def _check(totals, batches):
  largest, counts, total, squares = _expected(batches)
  assert totals.means()["x/max"] == np.float32(largest)
  found = totals.distributions()["x"]
  assert found.limits == (-1.0, -0.5, 0.0, 0.5, 1.0)
  assert list(found.counts) == counts.tolist()
  assert found.total == pytest.approx(total, rel=1e-5)
  assert found.total_squares == pytest.approx(squares, rel=1e-5)


def test_maxima_and_histograms_of_several_batches():
  batches = [_weighted(seed) for seed in range(3)]
  totals = metrics.Totals()
  for values, weights in batches:
    totals.add(_measure(jax.device_put(values), jax.device_put(weights)))
  _check(totals, batches)
  assert set(totals.means()) == {"x/max", "mean"}


def test_parts_of_a_batch_add_up_to_it():
  values, weights = _weighted(0)
  parts = jax.vmap(_measure)(
    jnp.reshape(values, (4, 2, 6)), jnp.reshape(weights, (4, 2, 6))
  )
  totals = metrics.Totals()
  totals.add(metrics.add(parts))
  _check(totals, [(values, weights)])


def test_shards_of_a_batch_do_not_matter():
  values, weights = _weighted(1)
  laid_out = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse("data=8")))
  pair = jax.device_put((values, weights), laid_out.batch_sharding(2))
  sharded = laid_out.jit(_measure, out_shardings=laid_out.replicated)(*pair)
  totals = metrics.Totals()
  totals.add(sharded)
  _check(totals, [(values, weights)])


def test_there_is_no_maximum_of_nothing_and_a_nan_stays():
  zeros, ones = jnp.zeros((2,)), jnp.ones((2,))
  totals = metrics.Totals()
  totals.add(metrics.maximum("x", ones, weights=zeros))
  assert totals.means() == {}
  totals.add(metrics.maximum("x", -ones, weights=ones))
  assert totals.means()["x/max"] == -1
  totals.add(metrics.maximum("x", zeros * math.nan, weights=ones))
  totals.add(metrics.maximum("x", ones, weights=ones))
  assert math.isnan(totals.means()["x/max"])


def test_what_changes_no_metric():
  values, weights = _weighted(2)
  found = _measure(jnp.asarray(values), jnp.asarray(weights))
  both = jax.tree.map(
    lambda *x: jnp.stack(x), found, metrics.empty(jax.eval_shape(lambda: found))
  )
  jax.tree.map(np.testing.assert_array_equal, metrics.add(both), found)


@pytest.mark.parametrize(
  ("low", "high", "bins"), [(1.0, 1.0, 4), (0.0, 1.0, 0)]
)
def test_a_histogram_needs_bins(low, high, bins):
  x = jnp.ones((2,))
  with pytest.raises(ValueError, match="histogram 'x' needs low < high and"):
    metrics.histogram("x", x, weights=x, low=low, high=high, bins=bins)
