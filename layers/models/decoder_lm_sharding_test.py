"""The decoder language model on eight devices equals that on one."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, testing
from paxon.layers.attention import kernels
from paxon.layers.decoding import generate, model_steps, samplers
from paxon.layers.models import testing as models_testing
from paxon.layers.stacks import stack
from paxon.sharding import initialization, layout, mesh, variables

BATCH = models_testing.packed_batch([[6, 2], [8], [3, 4], [5]] * 2, 8)
ARGS = models_testing.token_args(BATCH)


def _layout(text):
  spec = mesh.MeshSpec.parse(text)
  return layout.Layout(mesh.make_mesh(spec))


def _loss_and_gradient(model):
  def loss(values, batch):
    total, weight = model.apply(values, batch, method="loss")[0]
    return total / weight

  return jax.value_and_grad(loss)


@functools.cache
def _whole(**settings):
  """A model, its values, and loss and gradient on one device."""
  model = models_testing.tiny_decoder(**settings)
  values = testing.random_values(model, *ARGS)
  return model, values, jax.jit(_loss_and_gradient(model))(values, BATCH)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("text", "settings", "collectives"),
  [
    pytest.param(
      "fsdp=4,tensor=2", {}, ["all-gather", "all-reduce"], id="fsdp, tensor"
    ),
    pytest.param(
      "data=2,fsdp=2,tensor=2",
      {"scan": False, "kernel": kernels.fused},
      ["all-gather", "all-reduce"],
      id="all, unrolled, fused",
    ),
    pytest.param("data=2,sequence=4", {}, ["all-gather"], id="data, sequence"),
  ],
)
def test_sharded_equals_unsharded(text, settings, collectives):
  model, values, expected = _whole(**settings)
  specs = testing.specs(model, *ARGS)
  where = _layout(text)
  shardings = where.shardings(specs)
  compiled = (
    where.jit(
      _loss_and_gradient(model),
      in_shardings=(
        shardings,
        {name: where.batch_sharding(2) for name in BATCH},
      ),
      out_shardings=(where.replicated, shardings),
    )
    .lower(values, BATCH)
    .compile()
  )
  for collective in collectives:
    assert f" {collective}" in compiled.as_text()
  placed = testing.place((values, BATCH), compiled.input_shardings[0])
  actual = compiled(*placed)
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6),
    actual[1],
    expected[1],
  )
  query = actual[1]["params"]["stack"]["layers"]["blocks_0"]["attention"][
    "query"
  ]
  over = int(np.prod([where.mesh.shape[a] for a in ("fsdp", "tensor")]))
  assert query.addressable_shards[0].data.size * over == query.size


def test_absolute_positions_and_combined_projections_shard_alike():
  model = models_testing.tiny_gpt2()
  specs = testing.specs(model, *ARGS)
  values = testing.random_values(model, *ARGS)
  expected = jax.jit(_loss_and_gradient(model))(values, BATCH)
  where = _layout("fsdp=2,sequence=2,tensor=2")
  shardings = where.shardings(specs)
  run = where.jit(
    _loss_and_gradient(model), out_shardings=(where.replicated, shardings)
  )
  actual = run(
    testing.place(values, shardings),
    testing.place(BATCH, where.batch_sharding(2)),
  )
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6),
    actual,
    expected,
  )


def test_first_values_do_not_depend_on_the_mesh():
  # A small stack, because each initializer is compiled twice here.
  model = stack.Stack((feed_forward.GatedFeedForward(8),), num_layers=2)
  x = testing.normal(1, 2, 8)
  specs = testing.specs(model, x)
  where = _layout("fsdp=4,tensor=2")
  actual = where.jit(
    lambda: initialization.initial_values(specs, 0),
    out_shardings=where.shardings(specs),
  )()
  expected = testing.initial_values(model, x)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)
  up = actual["params"]["layers"]["blocks_0"]["up"]
  assert up.addressable_shards[0].data.size * 8 == up.size


def test_sharded_generation_equals_unsharded():
  model = models_testing.tiny_decoder()
  specs = testing.specs(model, *ARGS)
  values = testing.random_values(model, *ARGS)
  prompts = BATCH["inputs"][:, :4]
  lengths = testing.array([4, 2, 3, 1] * 2, jnp.int32)

  def run(values, prompts, lengths):
    return generate.generate(
      model_steps.make_prefill(model, values),
      model_steps.make_decode_step(model, values),
      prompts,
      lengths,
      sampler=samplers.Greedy(),
      key=jax.random.key(0),
      max_new_tokens=5,
    )

  expected = jax.jit(run)(values, prompts, lengths)
  where = _layout("fsdp=4,tensor=2")
  placed = testing.place(
    (values, prompts, lengths),
    (
      where.shardings(specs),
      where.batch_sharding(2),
      where.batch_sharding(1),
    ),
  )
  actual = where.jit(run)(*placed)
  np.testing.assert_array_equal(actual.ids, expected.ids)


def test_a_cache_is_sharded_by_batch_and_heads():
  model = models_testing.tiny_decoder()
  values = testing.random_values(model, *ARGS)
  where = _layout("fsdp=4,tensor=2")
  cache = variables.get_specs(
    jax.eval_shape(
      lambda v: model.apply(
        v, *ARGS, cache_length=8, method="prefill", mutable=["cache"]
      )[1],
      values,
    )
  )
  key = cache["cache"]["stack"]["layers_2"]["attention"]["cache"]["key"]
  spec = where.sharding(key.axes).spec
  batch, heads, slots, width = spec
  assert "fsdp" in batch
  assert (slots, heads, width) == (None, "tensor", None)


def test_rejects_heads_that_do_not_divide_by_the_mesh():
  model = models_testing.tiny_decoder()
  where = _layout("tensor=8")
  with pytest.raises(ValueError, match=r"'heads' of size 4 .* tensor=8"):
    where.shardings(testing.specs(model, *ARGS))


def test_axes_of_activations_have_rules():
  """Tracing under a layout would raise for an axis without a rule."""
  model = models_testing.tiny_decoder(dropout=nn.Dropout(0.1), tied=False)
  values = testing.random_values(model, *ARGS)
  where = _layout("data=8")
  logits = where.jit(model.apply)(values, *ARGS)
  assert np.all(np.isfinite(logits))
