"""Tests for the platform that a function is traced for."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.sharding import mesh, target


def _traced():
  """What a function sees while it is traced."""
  seen = []

  def fn(x):
    seen.append((target.is_cpu(), target.num_devices()))
    return x

  jax.jit(fn).trace(1.0)
  return seen[0]


def test_outside_of_a_mesh_it_is_that_of_the_process():
  assert _traced() == (True, 1)


def test_a_mesh_of_devices():
  with jax.set_mesh(mesh.make_mesh(mesh.MeshSpec.parse("fsdp=4,tensor=2"))):
    assert _traced() == (True, 8)


@pytest.mark.parametrize("platform", ["tpu", "gpu", "cuda"])
def test_a_mesh_of_other_devices_than_the_process_has(platform):
  device = jax.sharding.AbstractDevice("any", None, platform)
  other = jax.sharding.AbstractMesh((4,), ("data",), abstract_device=device)
  with jax.sharding.use_abstract_mesh(other):
    assert _traced() == (False, 4)


def _solve(matrices, vectors):
  return jax.scipy.linalg.solve_triangular(matrices, vectors)


def test_matrices_are_those_of_one_call():
  x = jax.random.normal(jax.random.key(0), (2, 3, 4, 4))
  b = jax.random.normal(jax.random.key(1), (2, 3, 4, 5))
  np.testing.assert_allclose(
    target.map_matrices(_solve, x, b), _solve(x, b), rtol=1e-4
  )
  found = target.map_matrices(jnp.linalg.eigh, x @ x.mT)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
    found,
    jnp.linalg.eigh(x @ x.mT),
  )
  single = target.map_matrices(_solve, x[0, 0], b[0, 0])
  np.testing.assert_allclose(single, _solve(x, b)[0, 0], rtol=1e-4)


_MANY_CALLS = """
import jax
from paxon.sharding import target

@jax.jit
def solve(xs):
  f = jax.scipy.linalg.solve_triangular
  return [target.map_matrices(f, x, x) for x in xs]

xs = list(jax.random.normal(jax.random.key(0), (24, 8, 32, 32)))
for _ in range(2):
  jax.block_until_ready(solve(xs))
"""


def test_many_calls_at_a_time_end():
  """Without `map_matrices` they wait for each other forever."""
  # Each device of the process adds a thread to the pool.
  environment = {
    **os.environ,
    "JAX_NUM_CPU_DEVICES": "1",
    "PYTHONPATH": os.pathsep.join(sys.path),
  }
  command = [sys.executable, "-c", _MANY_CALLS]
  subprocess.run(command, env=environment, timeout=100, check=True)
