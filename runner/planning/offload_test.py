"""Tests that values offloaded by a stack are in the memory of the host.

By a program compiled for an H200; on a CPU there is one memory only.
"""

import jax
import jax.numpy as jnp

from paxon.layers import feed_forward, remat
from paxon.layers import testing as layers_testing
from paxon.layers.stacks import stack
from paxon.runner.plan import target, testing, topology
from paxon.sharding import mesh, variables

LAYERS, BATCH, LENGTH, EMBED, MLP = 6, 2, 64, 32, 128
HIDDEN = 4 * LAYERS * BATCH * LENGTH * MLP


def _gradient(policy):
  layers = stack.Stack(
    (feed_forward.GatedFeedForward(MLP),),
    num_layers=LAYERS,
    remat_policy=policy,
  )
  x = jax.ShapeDtypeStruct((BATCH, LENGTH, EMBED), jnp.float32)
  values = variables.abstract(layers_testing.specs(layers, x))

  def loss(values, x):
    return jnp.sum(jnp.sin(layers.apply(values, x)))

  return jax.jit(jax.grad(loss)), values, x


def _compiled(policy):
  to = target.parse("h200:1x1")
  where = mesh.make_mesh(mesh.MeshSpec(), devices=topology.devices(to))
  fn, *args = _gradient(policy)
  whole = jax.sharding.NamedSharding(where, jax.sharding.PartitionSpec())
  placed = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), args
  )
  with jax.set_mesh(where):
    traced = fn.trace(*placed)
  return topology.compile_for(to, traced, where)


def test_what_is_offloaded_is_in_the_memory_of_the_host(monkeypatch):
  to = testing.target("h200:1x1")
  for name, value in topology.environment(to).items():
    monkeypatch.setenv(name, value)
  saved = _compiled(remat.save_only(remat.FEED_FORWARD_HIDDEN))
  moved = _compiled(remat.offload(remat.FEED_FORWARD_HIDDEN))
  before, after = saved.memory_analysis(), moved.memory_analysis()
  assert before.host_temp_size_in_bytes == 0
  assert after.host_temp_size_in_bytes == HIDDEN
  # Room for two layers on their way stays on the device.
  freed = before.temp_size_in_bytes - after.temp_size_in_bytes
  assert freed >= HIDDEN * (LAYERS - 2) / LAYERS
  stacked = f"f32[{LAYERS},{BATCH},{LENGTH},{MLP}]"
  lines = [line for line in moved.as_text().splitlines() if stacked in line]
  assert any("S(5)" in line for line in lines)
  assert "S(5)" not in saved.as_text()
