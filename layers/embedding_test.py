"""Tests for the embedding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, testing
from paxon.layers.positions import position_embedding
from paxon.sharding import layout, mesh

VOCAB, EMBED = 11, 6
IDS = testing.array([[1, 0, 10], [3, 3, 2]], jnp.int32)


def _layer(**kwargs):
  return embedding.Embedding(VOCAB, embed_dim=EMBED, **kwargs)


def _table(values):
  return np.asarray(values["params"]["table"], np.float64)


def test_looks_up_scaled_rows():
  layer = _layer(input_scale=2.5)
  values = testing.random_values(layer, IDS)
  y = testing.apply(layer, values, IDS)
  expected = np.zeros((*IDS.shape, EMBED))
  for b, t in np.ndindex(IDS.shape):
    expected[b, t] = 2.5 * _table(values)[int(IDS[b, t])]
  np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_attends_to_unscaled_rows():
  layer = _layer(input_scale=2.5)
  values = testing.random_values(layer, IDS)
  x = testing.normal(2, 3, EMBED)
  y = testing.apply(layer, values, x, method="attend")
  expected = np.zeros((2, 3, VOCAB))
  for b, t, v in np.ndindex(expected.shape):
    expected[b, t, v] = np.asarray(x, np.float64)[b, t] @ _table(values)[v]
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_attends_with_a_bias_and_a_scaled_input():
  layer = _layer(use_bias=True, attend_scale=EMBED**-0.5)
  values = testing.random_values(layer, IDS)
  x = testing.normal(2, 3, EMBED)
  expected = np.asarray(x, np.float64) @ _table(values).T / np.sqrt(EMBED)
  expected += np.asarray(values["params"]["bias"], np.float64)
  np.testing.assert_allclose(
    testing.apply(layer, values, x, method="attend"),
    expected,
    rtol=1e-5,
    atol=1e-6,
  )
  assert testing.axes(layer, IDS)["params/bias"] == ("vocab",)


def test_tied_gradient_matches_finite_differences():
  layer = _layer(input_scale=2.0)

  def loss(values):
    logits = testing.apply(
      layer, values, testing.apply(layer, values, IDS), method="attend"
    )
    return jnp.sum(jnp.sin(logits))

  testing.assert_gradients_match(loss, testing.random_values(layer, IDS))


def test_ids_outside_of_the_vocabulary_give_nan_and_spare_the_others():
  layer = _layer()
  values = testing.random_values(layer, IDS)
  y = np.asarray(testing.apply(layer, values, IDS.at[0, 1].set(VOCAB)))
  bad = np.isnan(y).any(axis=-1)
  assert bad.tolist() == [[False, True, False], [False] * 3]


def test_rows_start_with_length_one():
  layer = embedding.Embedding(500, embed_dim=64)
  table = testing.initial_values(layer, IDS)["params"]["table"]
  lengths = np.linalg.norm(np.asarray(table), axis=-1)
  np.testing.assert_allclose(lengths.mean(), 1.0, atol=0.02)


def test_bfloat16_compute_keeps_float32_params_and_logits():
  layer = _layer(dtype=jnp.bfloat16)
  values = testing.random_values(layer, IDS)
  x = testing.apply(layer, values, IDS)
  assert x.dtype == jnp.bfloat16
  assert values["params"]["table"].dtype == jnp.float32
  logits = testing.apply(layer, values, x, method="attend")
  assert logits.dtype == jnp.float32
  rounded = next(np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x,))
  table = np.asarray(values["params"]["table"].astype(jnp.bfloat16), np.float64)
  # No rounding after that of the operands: the sum itself is in float32.
  np.testing.assert_allclose(logits, rounded @ table.T, rtol=1e-5, atol=1e-6)


def test_param_dtype_is_the_stored_dtype():
  values = testing.random_values(_layer(param_dtype=jnp.bfloat16), IDS)
  assert values["params"]["table"].dtype == jnp.bfloat16


def test_logical_axes():
  assert testing.axes(_layer(), IDS) == {"params/table": ("vocab", "embed")}


def test_einsum_is_injected():
  calls = []

  def einsum(equation, *args, **kwargs):
    calls.append(equation)
    return jnp.einsum(equation, *args, **kwargs)

  layer = _layer(einsum=einsum)
  values = testing.random_values(layer, IDS)
  testing.apply(layer, values, testing.normal(2, 3, EMBED), method="attend")
  assert calls == ["BTD,VD->BTV"]


@pytest.mark.parametrize("field", ["vocab_size", "embed_dim"])
def test_rejects_nonpositive_sizes(field):
  sizes = {"vocab_size": VOCAB, "embed_dim": EMBED, field: 0}
  with pytest.raises(ValueError, match=f"Embedding.{field} must be positive"):
    embedding.Embedding(**sizes)


@pytest.mark.parametrize(
  ("text", "gathers"),
  [("data=2,fsdp=2,tensor=2", 1), ("data=2,fsdp=4", 1), ("data=4,tensor=2", 0)],
)
def test_a_split_table_is_looked_up_in_place(text, gathers, capfd):
  """Over fsdp rows are gathered as a weight, and no output is moved."""
  layer = embedding.Embedding(16, embed_dim=8)
  ids = testing.array(np.arange(64).reshape(8, 8) % 16, jnp.int32)
  scale = testing.normal(8, 8, 8)
  specs = testing.specs(layer, ids)
  values = testing.random_values(layer, ids)

  def total(values, ids, scale):
    return jnp.sum(layer.apply(values, ids) * scale)

  gradient = jax.value_and_grad(total)
  where = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse(text)))
  shardings = where.shardings(specs)
  places = shardings, where.batch_sharding(2), where.batch_sharding(3)
  compiled = (
    where.jit(
      gradient, in_shardings=places, out_shardings=(where.replicated, shardings)
    )
    .lower(values, ids, scale)
    .compile()
  )
  # XLA writes there that it replicates a whole tensor to move it.
  assert "rematerialization" not in capfd.readouterr().err
  program = compiled.as_text()
  for moved in ("all-to-all", "collective-permute"):
    assert f" {moved}" not in program
  assert program.count(" all-gather(") == gathers
  actual = compiled(*testing.place((values, ids, scale), places))
  expected = gradient(values, ids, scale)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5),
    actual,
    expected,
  )


def test_lookup_is_traceable_with_abstract_ids():
  layer = _layer()
  ids = jax.ShapeDtypeStruct((4, 5), jnp.int32)
  values = testing.random_values(layer, IDS)
  assert jax.eval_shape(layer.apply, values, ids).shape == (4, 5, EMBED)


TABLE = testing.normal(7, 4)
ROWS = testing.array([[0, 6, 3], [3, 3, -1]], jnp.int32)
BOTH = pytest.mark.parametrize("fn", [embedding.gather, embedding.one_hot])


@BOTH
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lookup_returns_rows_of_the_table(fn, dtype):
  table = np.asarray(TABLE, dtype)
  rows = np.asarray(jax.jit(fn)(table, ROWS))
  assert rows.dtype == dtype
  for at in np.ndindex(ROWS.shape):
    np.testing.assert_array_equal(rows[at], table[int(ROWS[at])])


@BOTH
def test_lookup_outside_of_the_table_gives_nan(fn):
  rows = np.asarray(jax.jit(fn)(TABLE, np.int32([0, 7, -8])))
  assert np.isnan(rows).all(axis=-1).tolist() == [False, True, True]


@BOTH
def test_gradients_of_lookups_match_finite_differences(fn):
  testing.assert_gradients_match(
    lambda table: jnp.sum(jnp.sin(fn(table, ROWS))), TABLE
  )


def test_one_hot_is_a_matmul():
  assert not testing.dots(jax.make_jaxpr(embedding.gather)(TABLE, ROWS))
  assert len(testing.dots(jax.make_jaxpr(embedding.one_hot)(TABLE, ROWS))) == 1


def test_one_hot_of_float32_is_exact():
  """For accelerators; on a CPU it is so by default."""
  for dtype, is_highest in ((jnp.float32, True), (jnp.bfloat16, False)):
    made = jax.make_jaxpr(embedding.one_hot)(TABLE.astype(dtype), ROWS)
    assert ("HIGHEST" in str(made)) == is_highest


@pytest.mark.parametrize(
  "layer",
  [
    embedding.Embedding(7, embed_dim=4, lookup=embedding.one_hot),
    position_embedding.LearnedPositions(7, lookup=embedding.one_hot),
  ],
)
def test_the_lookup_is_configurable(layer):
  args = (ROWS,) if isinstance(layer, embedding.Embedding) else (ROWS, 4)
  values = {"params": {"table": TABLE}}
  gathered = layer.clone(lookup=embedding.gather).apply(values, *args)
  np.testing.assert_array_equal(layer.apply(values, *args), gathered)
  counted = []

  def counting(table, ids):
    counted.append(ids.shape)
    return embedding.gather(table, ids)

  layer.clone(lookup=counting).apply(values, *args)
  assert counted == [ROWS.shape]
