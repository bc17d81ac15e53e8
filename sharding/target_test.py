"""Tests for the platform that a function is traced for."""

import jax
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
