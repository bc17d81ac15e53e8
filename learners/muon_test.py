"""Sides of matrices, and orthogonalization against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import muon, schedules, testing

RATE = schedules.Constant(value=1.0)


def _polynomial(singular_values, norm):
  x = singular_values / norm
  for _ in range(5):
    x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
  return x


@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (2, 4, 4)])
def test_orthogonalize_maps_singular_values_by_the_polynomial(shape):
  x = np.random.default_rng(0).normal(size=shape)
  u, s, vt = np.linalg.svd(x, full_matrices=False)
  norm = np.sqrt(np.sum(s**2, axis=-1, keepdims=True))
  expected = (u * _polynomial(s, norm)[..., None, :]) @ vt
  actual = muon.orthogonalize(jnp.asarray(x, jnp.float32))
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_orthogonalize_keeps_zeros():
  np.testing.assert_array_equal(muon.orthogonalize(jnp.zeros((3, 4))), 0)


@pytest.mark.parametrize(
  ("axes", "shape", "matrix"),
  [
    (("embed", "mlp"), (6, 8), (6, 8)),
    (("embed", "heads", "head_dim"), (6, 2, 4), (6, 8)),
    (("heads", "head_dim", "embed"), (2, 4, 6), (8, 6)),
    (("layers", "embed", "heads", "head_dim"), (3, 6, 2, 4), (3, 6, 8)),
    (("layers", "experts", "embed", "mlp"), (3, 2, 6, 4), (3, 2, 6, 4)),
    (("experts", "mlp", "embed"), (2, 8, 6), (2, 8, 6)),
    (("embed", "experts"), (6, 2), None),
    (("vocab", "embed"), (8, 6), None),
    (("embed", "vocab"), (6, 8), None),
    (("layers", "embed"), (3, 6), None),
  ],
)
def test_matrices_are_found_by_axes(axes, shape, matrix):
  stacked = (("layers", 1),) if axes[0] == "layers" else ()
  specs = {
    "params": {
      "x": testing.spec(
        "params/x",
        shape,
        axes=axes,
        stacked=stacked,
        regularized=len(shape) - len(stacked) > 1,
      )
    }
  }
  transform = muon.Muon(schedule=RATE, momentum=0.0, update_rms=None).transform(
    specs
  )
  g = np.random.default_rng(0).normal(size=shape)
  params = {"params": {"x": jnp.asarray(g, jnp.float32)}}
  updates, _ = transform.update(params, transform.init(params), params)
  if matrix is None:
    expected = np.sign(g)  # Adam's first step.
  else:
    u, s, vt = np.linalg.svd(g.reshape(matrix), full_matrices=False)
    norm = np.sqrt(np.sum(s**2, axis=-1, keepdims=True))
    expected = (u * _polynomial(s, norm)[..., None, :]) @ vt
    expected *= np.sqrt(max(1, matrix[-1] / matrix[-2]))
  np.testing.assert_allclose(
    -updates["params"]["x"], expected.reshape(shape), rtol=1e-4, atol=1e-5
  )


def test_matrices_have_no_second_moment():
  specs = {
    "params": {
      "w": testing.spec("params/w", (4, 6)),
      "b": testing.spec("params/b", (6,)),
    }
  }
  params = jax.tree.map(lambda s: jnp.zeros(s.shape), specs)
  state = muon.Muon(schedule=RATE).transform(specs).init(params)
  assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) == (
    4 * 6 + 1 + 2 * 6
  )


def test_without_specs_matrices_are_arrays_of_two_dimensions():
  transform = muon.Muon(schedule=RATE, weight_decay=0.5).transform()
  params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = transform.update(zeros, transform.init(params), params)
  np.testing.assert_allclose(optax.tree.max(updates), -0.5)
