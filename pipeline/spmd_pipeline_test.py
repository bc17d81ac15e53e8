"""Tests for pipelined stacks: the numbers of a stack that is no pipeline."""

import functools
import itertools

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import remat
from paxon.layers import testing as layers_testing
from paxon.layers.stacks import stack
from paxon.pipeline import spmd_pipeline, stage_sharding, testing
from paxon.sharding import layout, mesh, variables
from paxon.sharding import rules as rules_lib

# Stages, microbatches, repeats, and a mesh, or one device.
_SIZES = (
  (2, 4, 1, "stage=2,data=2,tensor=2"),
  # They wait between repeats.
  (2, 4, 2, "tensor=2,data=2,dcn.stage=2"),
  (2, 2, 1, "stage=2,fsdp=2,tensor=2"),
  # Fewer microbatches than stages, twice around.
  (4, 2, 2, ""),
  (4, 8, 1, ""),
  (2, 4, 1, ""),
  (1, 2, 1, ""),
)
# Layers, and blocks of a period: some do not divide by stages, or periods.
_LAYERS = ((4, 1), (5, 1), (9, 2), (9, 1))
_KEPT = (
  {},
  {"iteration_policy": None},
  {"scan": False, "remat_policy": remat.save_projections},
)


def _is_possible(case):
  """Whether all stages have layers, and take turns while streaming."""
  (stages, microbatches, repeats, _), (num_layers, period), *_ = case
  streaming = case[2]
  return stages * repeats <= num_layers // period and not (
    streaming and microbatches % stages
  )


# With layers, streaming or not, tied or not, and what ticks keep.
_CASES = tuple(
  filter(
    _is_possible,
    itertools.product(_SIZES, _LAYERS, (True, False), (True, False), _KEPT),
  )
)


@functools.cache
def _sequential(num_layers, period, tied):
  """The values, and loss and gradients by a plain stack, in float64."""
  blocks = (testing.mixing(tied=tied),) * period
  plain = stack.Stack(blocks, num_layers=num_layers, pass_layer_index=True)
  args = testing.arguments()
  values = layers_testing.random_values(plain, *args)
  specs = layers_testing.specs(plain, *args)
  values, args = testing.as_float64((values, args))
  return values, specs, args, jax.jit(_gradient(plain))(values, *args)


def _gradient(module):
  def loss(values, x, positions, table):
    y = module.apply(values, x, positions, table)
    return jnp.sum(jnp.sin(y))

  return jax.value_and_grad(loss, argnums=(0, 1, 3))


def _run(fn, on, rules, specs, *args):
  """Runs a function of variables and a batch on a mesh, or on one device."""
  if not on:
    return jax.jit(fn)(*args)
  made = mesh.make_mesh(mesh.MeshSpec.parse(on))
  laid_out = layout.Layout(made, rules)
  rows = laid_out.batch_sharding(1)
  placed = [
    layers_testing.place(x, rows if x.shape[0] == testing.BATCH else None)
    for x in args[1:]
  ]
  values = layers_testing.place(args[0], laid_out.shardings(specs))
  return laid_out.jit(fn)(values, *placed)


# The same cases each time; each is a program to compile.
@hypothesis.settings(
  max_examples=6,
  database=None,
  # A case says enough; a simpler one would be compiled for minutes.
  phases=(hypothesis.Phase.generate,),
  suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(case=strategies.sampled_from(_CASES))
def test_loss_and_gradients_are_those_of_a_stack(case):
  (stages, microbatches, repeats, on), layers, streaming, tied, kept = case
  num_layers, period = layers
  with jax.enable_x64(True):
    values, specs, args, expected = _sequential(num_layers, period, tied)
    pipelined = spmd_pipeline.PipelinedStack(
      (testing.mixing(tied=tied),) * period,
      num_layers=num_layers,
      pass_layer_index=True,
      num_stages=stages,
      num_microbatches=microbatches,
      circular_repeats=repeats,
      streaming=streaming,
      **kept,
    )
    rules = stage_sharding.with_stages(
      rules_lib.DEFAULT_RULES,
      num_stages=stages,
      num_groups=num_layers // period,
      circular_repeats=repeats,
      streaming=streaming,
    )
    actual = _run(_gradient(pipelined), on, rules, specs, values, *args)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
      np.testing.assert_allclose(a, e, rtol=1e-10, atol=1e-12)


def _pipelined(num_layers=4, blocks=1, **settings):
  settings = {"num_stages": 2, "num_microbatches": 4, **settings}
  return spmd_pipeline.PipelinedStack(
    (testing.mixing(),) * blocks, num_layers=num_layers, **settings
  )


def test_variables_are_those_of_a_stack():
  args = testing.arguments()
  plain = stack.Stack((testing.mixing(),) * 2, num_layers=5)
  pipelined = _pipelined(5, 2)
  assert layers_testing.specs(pipelined, *args) == layers_testing.specs(
    plain, *args
  )


def test_separate_layers_are_applied_one_after_another():
  args = testing.arguments()
  pipelined = _pipelined()
  values = layers_testing.random_values(pipelined, *args)
  specs = layers_testing.specs(pipelined, *args)
  separate = variables.separate_layers(values, specs)
  plain = stack.Stack((testing.mixing(),), num_layers=4)
  np.testing.assert_allclose(
    layers_testing.apply(pipelined, separate, *args),
    layers_testing.apply(plain, values, *args),
    rtol=1e-5,
    atol=1e-6,
  )


def test_layers_with_shared_parts_may_be_rematerialized():
  """The parts' parameters are at the root, outside of what is lifted."""
  args = testing.arguments()
  plain = stack.Stack((testing.mixing(tied=True),), num_layers=4)
  values = layers_testing.random_values(plain, *args)
  pipelined = spmd_pipeline.PipelinedStack(
    (testing.mixing(tied=True),),
    num_layers=4,
    num_stages=2,
    num_microbatches=2,
    remat_policy=remat.save_projections,
  )
  loss, gradients = jax.eval_shape(_gradient(pipelined), values, *args)
  assert loss.shape == ()
  assert jax.tree.structure(gradients[0]) == jax.tree.structure(values)


def test_programs_do_not_grow_with_microbatches():
  def size(number):
    args = testing.arguments(batch=128)
    pipelined = _pipelined(num_microbatches=number, streaming=True)
    values = layers_testing.random_values(pipelined, *args)
    traced = jax.make_jaxpr(_gradient(pipelined))(values, *args)
    return str(traced).count(" = ")

  sizes = [size(number) for number in (4, 16, 64)]
  assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    pytest.param(
      {"num_microbatches": None},
      r"needs exactly one of num_microbatches and micro.*, got None and None",
      id="no microbatches",
    ),
    pytest.param(
      {"microbatch_size": 2},
      r"needs exactly one of num_microbatches and micro.*, got 4 and 2",
      id="two microbatches",
    ),
    pytest.param(
      {"num_stages": 8},
      r"num_stages \(8\) must be at most the number of layers, got"
      r" num_layers=4",
      id="more stages than layers",
    ),
    pytest.param(
      {"circular_repeats": 3},
      r"num_stages \(2\) times circular_repeats \(3\) must be at most the"
      r" number of layers, got num_layers=4",
      id="more repeats than layers",
    ),
    pytest.param(
      {"num_layers": 5, "blocks": 3},
      r"num_stages \(2\) must be at most the number of layers in groups of 3"
      r" blocks, got num_layers=5",
      id="more stages than groups",
    ),
    pytest.param(
      {"streaming": True, "num_microbatches": 3},
      r"num_microbatches \(3\) must be a multiple of num_stages \(2\) with",
      id="streaming",
    ),
    pytest.param(
      {"num_stages": 0}, r"num_stages must be positive, got 0", id="no stage"
    ),
  ],
)
def test_rejects_impossible_pipelines(settings, message):
  with pytest.raises(ValueError, match=message):
    _pipelined(**settings)


@pytest.mark.parametrize(
  ("settings", "on", "message"),
  [
    pytest.param(
      {"num_microbatches": 3},
      "stage=2,data=-1",
      r"num_microbatches \(3\) must divide the batch of 8 sequences; use 1, 2",
      id="number",
    ),
    pytest.param(
      {"num_microbatches": None, "microbatch_size": 3},
      "stage=2,data=-1",
      r"microbatch_size \(3\) must divide the batch of 8 sequences; use 1,",
      id="size",
    ),
    pytest.param(
      {"num_microbatches": None, "microbatch_size": 8, "streaming": True},
      "stage=2,data=-1",
      r"microbatch_size \(8\) splits the batch of 8 sequences into 1 microba.*;"
      r" with streaming=True their number must be a multiple of num_stages",
      id="streaming",
    ),
    pytest.param(
      {"num_microbatches": 4},
      "stage=2,data=-1",
      r"4 microbatches of a batch of 8 have 2 sequences each, which must be a"
      r" multiple of the 4 shards of the batch",
      id="shards",
    ),
    pytest.param(
      {},
      "fsdp=-1",
      r"num_stages \(2\) needs a mesh with stage=2, got the mesh 'fsdp=8'",
      id="no stage axis",
    ),
    pytest.param(
      {}, "stage=4,data=-1", r"got the mesh 'stage=4,data=2'", id="other stages"
    ),
  ],
)
def test_rejects_batches_and_meshes_that_do_not_fit(settings, on, message):
  args = testing.arguments()
  pipelined = _pipelined(**settings)
  values = layers_testing.random_values(pipelined, *args)
  made = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse(on)))
  with pytest.raises(ValueError, match=message):
    made.jit(pipelined.apply).trace(values, *args)
