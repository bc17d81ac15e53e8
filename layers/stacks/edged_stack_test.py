"""Tests for stacks with other first and last layers."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, remat, summaries, testing
from paxon.layers.attention import grouped_query
from paxon.layers.attention import mask as attention_mask
from paxon.layers.stacks import edged_stack, stack
from paxon.sharding import variables

BATCH, LENGTH, EMBED = 2, 5, 6


class Layer(nn.Module):
  """Attention and a feed-forward layer that may be another function."""

  activation: object = nn.silu
  window: int | None = None

  @nn.compact
  def __call__(self, x, context, *, layer_index=None):
    """Returns `x` and a branch."""
    attention = grouped_query.GroupedQueryAttention(
      2,
      num_kv_heads=1,
      head_dim=4,
      mask=attention_mask.MaskRules(window=self.window),
      name="attention",
    )
    x += attention(x, context)
    hidden = feed_forward.GatedFeedForward(
      8, activation=self.activation, name="feed_forward"
    )(x)
    if self.activation is nn.silu:
      summaries.summarize(self, "rms", jnp.sqrt(jnp.mean(hidden**2)))
    if self.has_rng("dropout"):
      hidden += jax.random.normal(self.make_rng("dropout"), x.shape)
    if layer_index is not None:
      hidden *= 1 - 0.1 * jnp.float32(layer_index)
    return x + hidden


def _edged(num_layers, first, last, period=1, **kwargs):
  return edged_stack.EdgedStack(
    [Layer(window=w) for w in (2, None)[:period]],
    num_layers=num_layers,
    edge_blocks=[Layer(nn.tanh, window=w) for w in (2, None)[:period]],
    num_first=first,
    num_last=last,
    **kwargs,
  )


def _args():
  return (
    testing.normal(BATCH, LENGTH, EMBED),
    testing.make_positions(BATCH, LENGTH),
    testing.ones(BATCH, LENGTH),
  )


def _layers_of(values, num_layers, period):
  """The variables of each layer, from the documented storage of a stack."""
  for i in range(num_layers):
    group, slot = divmod(i, period)
    if group < num_layers // period:
      stored = values["params"]["layers"][f"blocks_{slot}"]
      yield {"params": jax.tree.map(lambda x, g=group: x[g], stored)}
    else:
      yield {"params": values["params"][f"layers_{i}"]}


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("num_layers", "first", "last", "period", "options"),
  [
    pytest.param(4, 1, 1, 1, {}, id="one_each"),
    pytest.param(
      7, 1, 2, 2, {"scan": False, "pass_layer_index": True}, id="cut_period"
    ),
    pytest.param(
      4, 2, 0, 1, {"remat_policy": remat.save_nothing}, id="first_only"
    ),
  ],
)
def test_equals_a_python_loop(num_layers, first, last, period, options):
  layer = _edged(num_layers, first, last, period, **options)
  plain = stack.Stack(layer.blocks, num_layers=num_layers)
  values = testing.random_values(layer, *testing.in_context(*_args()))
  same = testing.random_values(plain, *testing.in_context(*_args()))
  assert jax.tree.structure(values) == jax.tree.structure(same)
  numbered = options.get("pass_layer_index", False)

  def looped(values, x, *args):
    own = _layers_of(values, num_layers, period)
    for i, layer_values in enumerate(own):
      is_edge = i < first or i >= num_layers - last
      block = (layer.edge_blocks if is_edge else layer.blocks)[i % period]
      more = {"layer_index": i} if numbered else {}
      x = block.apply(layer_values, *testing.in_context(x, *args), **more)
    return jnp.sum(x**2), x

  def stacked(values, *args):
    x = layer.apply(values, *testing.in_context(*args))
    return jnp.sum(x**2), x

  expected, actual = (
    jax.jit(jax.value_and_grad(fn, has_aux=True))(values, *_args())
    for fn in (looped, stacked)
  )
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6 * np.abs(b).max())
  separate = variables.separate_layers(
    values, testing.specs(layer, *testing.in_context(*_args()))
  )
  y, out = (
    testing.apply(layer, separate, *testing.in_context(*_args())),
    expected[0][1],
  )
  np.testing.assert_allclose(y, out, rtol=2e-5, atol=1e-6 * np.abs(out).max())


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("num_layers", "first", "last", "period"),
  [
    pytest.param(4, 1, 1, 1, id="one_each"),
    pytest.param(9, 3, 1, 2, id="cut_period"),
  ],
)
def test_generates_as_it_trains(num_layers, first, last, period):
  layer = _edged(num_layers, first, last, period)
  x, positions, segment_ids = _args()
  # Without norms, larger values would grow with every layer.
  values = jax.tree.map(
    lambda x: x / 2, testing.random_values(layer, *testing.in_context(*_args()))
  )
  whole = testing.apply(layer, values, *testing.in_context(*_args()))
  cut = 3
  y, new = testing.apply(
    layer,
    values,
    *testing.in_context(
      x[:, :cut], positions[:, :cut], segment_ids[:, :cut], cache_length=LENGTH
    ),
    mutable=["cache"],
  )
  np.testing.assert_allclose(y, whole[:, :cut], rtol=1e-5, atol=1e-5)
  # At the level of other tests LLVM fails on a mask of this program.
  options = {"xla_backend_optimization_level": 0}
  step = jax.jit(
    lambda v, *a: layer.apply(v, *testing.in_context(*a), mutable=["cache"]),
    compiler_options=options,
  )
  for t in range(cut, LENGTH):
    y, new = step(
      {**values, **new},
      x[:, t : t + 1],
      positions[:, t : t + 1],
      segment_ids[:, t : t + 1],
    )
    np.testing.assert_allclose(y[:, 0], whole[:, t], rtol=1e-5, atol=1e-5)


def test_summaries_keep_the_number_of_their_layer():
  """An exempt layer that tells nothing counts as zero."""
  layer = _edged(4, 1, 1)
  values = testing.random_values(layer, *testing.in_context(*_args()))
  _, new = testing.apply(
    layer, values, *testing.in_context(*_args()), mutable=["summaries"]
  )
  (rms,) = new["summaries"]["layers"]["blocks_0"]["rms"]
  assert rms.shape == (4,)
  np.testing.assert_array_equal(np.asarray(rms) > 0, [False, True, True, False])


def test_runs_draw_other_random_numbers():
  layer = _edged(3, 1, 1)
  values = jax.tree.map(
    jnp.zeros_like, testing.random_values(layer, *testing.in_context(*_args()))
  )
  x = jnp.zeros_like(_args()[0])

  @jax.jit
  def run(key):
    return layer.apply(
      values, *testing.in_context(x, *_args()[1:]), rngs={"dropout": key}
    )

  noise = [run(jax.random.key(i)) for i in range(2)]
  # A sum of three independent normal values has the variance 3; of equal ones
  # it would be 9, or 5 with two of them.
  assert np.abs(np.var(np.stack(noise)) - 3) < 1.5


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      {"edge_blocks": ()},
      "one entry for each of 1 blocks, got 0",
    ),
    (
      {"num_last": 4},
      r"num_last must be in .* \(3 layers\), got 4",
    ),
  ],
)
def test_wrong_fields(fields, message):
  given = {"edge_blocks": (Layer(),), **fields}
  with pytest.raises(ValueError, match=message):
    edged_stack.EdgedStack((Layer(),), num_layers=3, **given)
