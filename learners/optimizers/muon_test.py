"""Sides of matrices, and orthogonalization against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import schedules, testing
from paxon.learners.optimizers import muon
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes
from paxon.sharding import target

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


def test_iterations_in_bfloat16_are_close():
  x = np.random.default_rng(0).normal(size=(4, 32, 64))
  exact = muon.orthogonalize(jnp.asarray(x, jnp.float32))
  rough = muon.orthogonalize(jnp.asarray(x, jnp.bfloat16))
  assert rough.dtype == jnp.bfloat16
  error = np.linalg.norm(rough.astype(jnp.float32) - exact)
  assert error < 0.08 * np.linalg.norm(exact)
  values = np.linalg.svd(rough.astype(jnp.float32), compute_uv=False)
  assert np.all((values > 0.5) & (values < 1.5))


def test_devices_are_divided_between_shapes():
  # 36 of cost 3 and 72 of cost 1 (9 and 3): 36 devices, and 24 with 3 each.
  shapes = [(36, 8, 32), (72, 8, 8)]
  blocks = muon.assign_devices(shapes, 64)
  assert blocks == [range(36), range(36, 60)]
  # Nothing to gain.
  assert muon.assign_devices([(64, 8, 32), (64, 8, 8)], 64) is None
  assert muon.assign_devices([(3, 8, 32), (5, 8, 8), (1, 4, 4)], 2) is None
  assert muon.assign_devices([(5, 8, 8)], 4) is None


def test_divided_devices_compute_the_same():
  layout = layouts.Layout(
    meshes.make_mesh(meshes.MeshSpec.parse("fsdp=2,tensor=4"))
  )
  specs = {
    "params": {
      "wide": testing.spec(
        "params/wide",
        (4, 8, 24),
        axes=("layers", "embed", "mlp"),
        stacked=(("layers", 1),),
      ),
      "square": testing.spec(
        "params/square",
        (12, 8, 8),
        axes=("layers", "embed", "mlp"),
        stacked=(("layers", 1),),
      ),
    }
  }
  assert muon.assign_devices([(4, 8, 24), (12, 8, 8)], 8) is not None
  random = np.random.default_rng(0)
  values = jax.tree.map(
    lambda s: np.float32(random.normal(size=s.shape)), specs
  )
  transform = muon.Muon(schedule=RATE, iteration_dtype=jnp.float32).transform(
    specs
  )

  def run(params):
    return transform.update(params, transform.init(params), params)[0]

  shardings = layout.shardings(specs)
  params = jax.device_put(values, shardings)
  divided = layout.jit(run, in_shardings=(shardings,), out_shardings=shardings)(
    params
  )
  alone = jax.jit(run)(values)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    divided,
    alone,
  )


def test_iterations_are_float32_on_cpus_and_bfloat16_elsewhere():
  params = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)

  def update(dtype=None):
    transform = muon.Muon(schedule=RATE, iteration_dtype=dtype).transform()
    return transform.update(params, transform.init(params), params)[0]

  np.testing.assert_array_equal(update(), update(jnp.float32))
  with target.any_platform():
    elsewhere = update()
  np.testing.assert_array_equal(elsewhere, update(jnp.bfloat16))
  assert np.abs(elsewhere - update()).max() > 1e-5


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
  transform = muon.Muon(
    schedule=RATE,
    momentum=0.0,
    update_rms=None,
    iteration_dtype=jnp.float32,
  ).transform(specs)
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
