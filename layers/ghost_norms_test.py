"""Tests of ghost norms, compared with norms of gradients in float64."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, ghost_norms, linear
from paxon.quantization import equations
from paxon.sharding import variables


# By pairs of tokens, and by the gradient where there are many tokens.
@pytest.mark.parametrize("length", [2, 40])
@pytest.mark.parametrize(
  ("equation", "lhs", "rhs"),
  [
    ("BTD,DF->BTF", (1, -1, 6), (6, 8)),
    ("BTD,DNH->BTNH", (1, -1, 6), (6, 2, 4)),
    ("BTNH,NHD->BTD", (1, -1, 2, 4), (2, 4, 6)),
    ("BTED,EDF->BTEF", (1, -1, 2, 3), (2, 3, 5)),
    ("...D,DF->...F", (-1, 6), (6, 8)),
  ],
)
def test_norm_equals_that_of_the_gradient(equation, lhs, rhs, length):
  random = np.random.default_rng(0)
  lhs = random.normal(size=[length if n < 0 else n for n in lhs])
  parsed = equations.parse(equation, lhs.ndim, len(rhs))
  out = np.einsum(parsed.text, lhs, random.normal(size=rhs))
  gradient = random.normal(size=out.shape)
  expected = np.sum(np.einsum(parsed.backward_rhs.text, lhs, gradient) ** 2)
  actual = ghost_norms.squared_norm(
    parsed, jnp.asarray(lhs, jnp.float32), jnp.asarray(gradient, jnp.float32)
  )
  np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("lookup", [embedding.gather, embedding.one_hot])
def test_norm_of_a_table(lookup):
  layer = embedding.Embedding(
    8, embed_dim=4, lookup=ghost_norms.GhostLookup(lookup)
  )
  # Ids occur several times, also counted from the end.
  ids = jnp.asarray([[1, 3, 1, -7, 3, 1, 0]])
  made = variables.unbox(jax.jit(layer.init)(jax.random.key(0), ids))
  weight = jax.random.normal(jax.random.key(1), (1, 7, 4))

  def loss(values):
    return jnp.sum(layer.apply(values, ids) * weight)

  found = jax.jit(jax.grad(loss))(made)
  expected = np.sum(np.square(np.asarray(found["params"]["table"], np.float64)))
  (actual,) = jax.tree.leaves(found["ghost"])
  np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_layer_that_is_called_twice_is_an_error():
  class Twice(nn.Module):
    layer: nn.Module

    def __call__(self, x):
      return self.layer(self.layer(x))

  module = Twice(linear.Linear(4, einsum=ghost_norms.GhostEinsum()))
  with pytest.raises(ValueError, match="is computed twice in a forward pass"):
    module.init(jax.random.key(0), jnp.ones((2, 4)))
