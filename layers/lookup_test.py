"""Tests for lookups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, lookup, position_embedding, testing

TABLE = testing.normal(7, 4)
IDS = testing.array([[0, 6, 3], [3, 3, -1]], jnp.int32)
BOTH = pytest.mark.parametrize("fn", [lookup.gather, lookup.one_hot])


@BOTH
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_those_of_the_table(fn, dtype):
  table = np.asarray(TABLE, dtype)
  rows = np.asarray(jax.jit(fn)(table, IDS))
  assert rows.dtype == dtype
  for at in np.ndindex(IDS.shape):
    np.testing.assert_array_equal(rows[at], table[int(IDS[at])])


@BOTH
def test_ids_outside_of_the_table_give_nan(fn):
  rows = np.asarray(jax.jit(fn)(TABLE, np.int32([0, 7, -8])))
  assert np.isnan(rows).all(axis=-1).tolist() == [False, True, True]


@BOTH
def test_gradients_match_finite_differences(fn):
  testing.assert_gradients_match(
    lambda table: jnp.sum(jnp.sin(fn(table, IDS))), TABLE
  )


def test_a_product_is_what_it_says():
  assert not testing.dots(jax.make_jaxpr(lookup.gather)(TABLE, IDS))
  assert len(testing.dots(jax.make_jaxpr(lookup.one_hot)(TABLE, IDS))) == 1


def test_a_product_of_float32_is_made_of_all_its_digits():
  """For accelerators; on a CPU it is so by default."""
  for dtype, is_highest in ((jnp.float32, True), (jnp.bfloat16, False)):
    made = jax.make_jaxpr(lookup.one_hot)(TABLE.astype(dtype), IDS)
    assert ("HIGHEST" in str(made)) == is_highest


@pytest.mark.parametrize(
  "layer",
  [
    embedding.Embedding(7, embed_dim=4, lookup=lookup.one_hot),
    position_embedding.LearnedPositions(7, lookup=lookup.one_hot),
  ],
)
def test_a_lookup_is_injected(layer):
  args = (IDS,) if isinstance(layer, embedding.Embedding) else (IDS, 4)
  values = {"params": {"table": TABLE}}
  gathered = layer.clone(lookup=lookup.gather).apply(values, *args)
  np.testing.assert_array_equal(layer.apply(values, *args), gathered)
  counted = []

  def counting(table, ids):
    counted.append(ids.shape)
    return lookup.gather(table, ids)

  layer.clone(lookup=counting).apply(values, *args)
  assert counted == [IDS.shape]
