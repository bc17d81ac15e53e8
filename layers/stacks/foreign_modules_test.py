"""Tests for linen modules from elsewhere as parts of ours.

A module of another library is a part like any other: no adapter is needed. What
it says of its parameters, by linen's own boxes or not at all, is understood in
`sharding.variables`.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import grouped_query
from paxon.layers.norms import rms_norm
from paxon.layers.stacks import block, stack
from paxon.sharding import initialization, layout, mesh, variables

EMBED, MLP = 8, 16


class Foreign(nn.Module):
  """A feed-forward layer as others write it."""

  boxed: bool = True

  @nn.compact
  def __call__(self, x):
    """Returns the transformed `x`."""

    def init(*names):
      plain = nn.initializers.lecun_normal()
      return nn.with_logical_partitioning(plain, names) if self.boxed else plain

    up = nn.Dense(MLP, kernel_init=init("embed", "mlp"), name="up")
    down = nn.Dense(EMBED, kernel_init=init("mlp", "embed"), name="down")
    return down(nn.gelu(up(x)))


def _stack(part):
  attention = grouped_query.GroupedQueryAttention(2, num_kv_heads=2, head_dim=4)
  layer = block.TransformerBlock(
    rms_norm.RmsNorm(), attention, nn.LayerNorm(), part, nn.Dropout(0.1)
  )
  return stack.Stack((layer,) * 2, num_layers=4)


def _args():
  return (
    testing.normal(8, 4, EMBED),
    testing.make_positions(8, 4),
    testing.ones(8, 4),
  )


@pytest.fixture(name="case", scope="module", params=[True, False])
def _case(request):
  model = _stack(Foreign(boxed=request.param))
  return request.param, model, testing.specs(model, _args()[0])


@pytest.fixture(name="values", scope="module")
def _values(case):
  """First values, those of foreign parts by their own initializers."""
  _, model, specs = case

  def fallback():
    return variables.unbox(model.init(jax.random.key(1), _args()[0]))

  return jax.jit(
    lambda: initialization.initial_values(specs, 0, fallback=fallback)
  )()


def test_specs_know_axes_layers_and_rank(case):
  boxed, _, specs = case
  part = specs["params"]["layers"]["blocks_1"]["feed_forward"]
  kernel, bias = part["up"]["kernel"], part["up"]["bias"]
  names = ("embed", "mlp") if boxed else (None, None)
  assert kernel.axes == ("layers", *names)
  assert kernel.shape == (2, EMBED, MLP)
  for spec in (kernel, bias):
    assert spec.stacked == (("layers", 2),)
    assert spec.initializer is None
    assert spec.trainable
  assert kernel.layer_shape == (EMBED, MLP)
  # Rank is that of one layer: a stacked bias is no matrix.
  assert kernel.regularized
  assert not bias.regularized
  assert bias.axes == ("layers", None)


def test_first_values_are_their_own(values):
  values = values["params"]["layers"]
  up = [values[f"blocks_{i}"]["feed_forward"]["up"]["kernel"] for i in (0, 1)]
  assert len(np.unique(np.stack(up))) == 4 * EMBED * MLP
  np.testing.assert_allclose(np.std(up), EMBED**-0.5, rtol=0.15)


@pytest.mark.nightly(keep=1)
def test_sharded_is_unsharded(case, values):
  _, model, specs = case
  where = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse("fsdp=4,tensor=2")))
  split = where.shardings(specs)

  def loss(values, *args):
    return jnp.sum(jnp.sin(model.apply(values, *testing.in_context(*args))))

  gradient = jax.grad(loss)
  places = split, where.batch_sharding(3), *(where.batch_sharding(2),) * 2
  compiled = where.jit(gradient, in_shardings=places, out_shardings=split)
  actual = compiled(*testing.place((values, *_args()), places))
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5),
    actual,
    jax.jit(gradient)(values, *_args()),
  )


def test_named_axes_are_split(case):
  boxed, _, specs = case
  where = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse("fsdp=4,tensor=2")))
  up = where.shardings(specs)["params"]["layers"]["blocks_0"]["feed_forward"]
  names = (None, "fsdp", "tensor") if boxed else ()
  spec = tuple(up["up"]["kernel"].spec)
  assert [n for n in spec if n] == [n for n in names if n]


def test_any_method_and_any_collection():
  """A method by name, and a collection that only its module knows."""

  class Counting(nn.Module):
    @nn.compact
    def encode(self, x):
      count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
      count.value += 1
      return nn.Dense(EMBED)(x)

  class Adapted(nn.Module):
    part: nn.Module

    def __call__(self, x):
      return self.part.encode(x)

  layers = stack.Stack((Adapted(Counting()),), num_layers=3)
  x = testing.normal(1, 2, EMBED)
  specs = testing.specs(layers, x)
  calls = specs["counts"]["layers"]["blocks_0"]["part"]["calls"]
  assert calls.update is variables.UpdateRule.REPLACE
  assert calls.shape == (3,)
  assert calls.layer_shape == ()
  values = jax.jit(layers.init)(jax.random.key(0), x)
  _, state = testing.apply(layers, values, x, mutable=["counts"])
  assert jax.tree.leaves(state)[0].tolist() == [2, 2, 2]


def test_a_sequence_of_functions_is_a_part():
  """Chains are linen's `Sequential`, or a call after a call."""
  part = nn.Sequential([nn.Dense(MLP), nn.relu, nn.Dense(EMBED)])
  layers = stack.Stack((part,), num_layers=2)
  x = testing.normal(1, 2, EMBED)
  values = testing.random_values(layers, x)
  stored = values["params"]["layers"]["blocks_0"]
  y = np.asarray(x, np.float64)
  for i in range(2):
    first, last = (
      {k: np.asarray(v[i], np.float64) for k, v in stored[n].items()}
      for n in ("layers_0", "layers_2")
    )
    hidden = np.maximum(y @ first["kernel"] + first["bias"], 0)
    y = hidden @ last["kernel"] + last["bias"]
  np.testing.assert_allclose(
    testing.apply(layers, values, x), y, rtol=1e-5, atol=1e-5
  )
