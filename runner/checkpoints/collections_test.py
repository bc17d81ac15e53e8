"""A checkpoint keeps collections that users name (google/praxis issue 22)."""

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, remat
from paxon.layers.stacks import shared, stack
from paxon.runner.checkpoints import checkpointer
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes
from paxon.sharding import variables


class _Layer(nn.Module):
  """A feed-forward layer that keeps what it saw in a collection of its own."""

  feed_forward: nn.Module

  @nn.compact
  def __call__(self, x):
    """Returns the transformed `x`."""
    seen = self.variable("my_records", "mean", jnp.zeros, (), jnp.float32)
    seen.value += jnp.mean(x)
    return x + self.feed_forward(x)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_collections_survive_init_apply_and_checkpoint(tmp_path, scan):
  part = shared.shared("mlp", feed_forward.GatedFeedForward(8))
  model = stack.Stack(
    (_Layer(part), _Layer(feed_forward.GatedFeedForward(8))),
    num_layers=5,
    scan=scan,
    remat_policy=remat.save_nothing,
  )
  x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4)), "f4")
  made = jax.jit(model.init)(jax.random.key(0), x)
  specs = variables.get_specs(made)
  assert set(specs) == {"params", "shared", "my_records"}
  values = variables.unbox(made)
  _, new = model.apply(values, x, mutable=["my_records"])
  values = {**values, **variables.unbox(new)}
  assert np.all(values["my_records"]["layers"]["blocks_1"]["mean"] != 0)

  where = layouts.Layout(
    meshes.make_mesh(meshes.MeshSpec.parse("fsdp=4,data=2"))
  )
  shardings = where.shardings(specs)
  folder = epath.Path(tmp_path)
  with checkpointer.Checkpointer(folder) as checkpoints:
    checkpoints.save(1, jax.device_put(values, shardings), specs=specs, data={})
  with checkpointer.Checkpointer(folder) as checkpoints:
    restored = checkpoints.restore(1, specs=specs, shardings=shardings).tree
  jax.tree.map(np.testing.assert_array_equal, restored, values)
  again = model.apply(jax.device_get(restored), x, mutable=["my_records"])
  expected = model.apply(values, x, mutable=["my_records"])
  jax.tree.map(np.testing.assert_array_equal, again, expected)
