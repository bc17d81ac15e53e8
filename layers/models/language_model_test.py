"""Tests for what goes into a stack."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, testing, token_context
from paxon.layers.models import language_model
from paxon.layers.positions import position_embedding

IDS = testing.array([[3, 1, 1], [0, 2, 3]], jnp.int32)
POSITIONS = testing.array([[0, 1, 2], [0, 0, 1]], jnp.int32)
TYPES = testing.array([[0, 0, 1], [1, 1, 0]], jnp.int32)


class Doubled(nn.Module):
  """A norm that doubles."""

  def __call__(self, x):
    return 2 * x


class Tokens(nn.Module):
  """All parts there are, or those asked for."""

  table: nn.Module
  positions: nn.Module | None = None
  types: nn.Module | None = None
  norm: nn.Module | None = None
  dropout: nn.Module | None = None

  def __call__(self, deterministic=True):
    return language_model.embed_tokens(
      IDS,
      token_context.TokenContext(POSITIONS, deterministic=deterministic),
      embedding=self.table,
      position_embedding=self.positions,
      types=None if self.types is None else (self.types, TYPES),
      norm=self.norm,
      dropout=self.dropout,
    )


def _model(**fields):
  return Tokens(embedding.Embedding(4, embed_dim=6), **fields)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parts_are_summed_normed_and_dropped(dtype):
  model = Tokens(
    embedding.Embedding(4, embed_dim=6, dtype=dtype),
    position_embedding.LearnedPositions(3),
    embedding.Embedding(2, embed_dim=6),
    Doubled(),
    nn.Dropout(0.5),
  )
  values = testing.random_values(model)
  tables = {k: np.asarray(v["table"]) for k, v in values["params"].items()}
  expected = tables["table"][IDS] + tables["positions"][POSITIONS]
  expected = 2 * (expected + tables["types"][TYPES])
  y = model.apply(values)
  assert y.dtype == dtype
  tolerance = 1e-6 if dtype == jnp.float32 else 4e-2
  np.testing.assert_allclose(
    y.astype(jnp.float32), expected, rtol=tolerance, atol=tolerance
  )
  rngs = {"dropout": jax.random.key(0)}
  dropped = model.apply(values, deterministic=False, rngs=rngs)
  kept = np.asarray(dropped != 0)
  assert 0.2 < kept.mean() < 0.8
  np.testing.assert_allclose(
    np.asarray(dropped, np.float32)[kept],
    2 * np.asarray(y, np.float32)[kept],
    rtol=1e-2,
  )


def test_the_table_alone_suffices():
  model = _model()
  values = testing.random_values(model)
  np.testing.assert_array_equal(
    model.apply(values), values["params"]["table"]["table"][IDS]
  )
