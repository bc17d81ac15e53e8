"""Mixtures of experts in pipelines and in cached decoding, on eight devices.

Sums over devices are in another order than on one, so numbers are compared, not
bits.
"""

import functools
import re

import jax
import numpy as np
import pytest

from paxon.layers import testing as layers_testing
from paxon.layers.losses import auxiliary_loss
from paxon.layers.models import testing as models_testing
from paxon.layers.moe import dispatch, experts, mixture, routers, routing
from paxon.layers.stacks import stack
from paxon.pipeline import spmd_pipeline, stage_sharding
from paxon.sharding import layout, mesh
from paxon.sharding import rules as rules_lib

BATCH, LENGTH, LAYERS, STAGES = 8, 6, 2, 2
EXPERTS, EMBED, MLP = 4, models_testing.EMBED, 20

# A group a sequence: its capacity does not depend on the microbatch.
_BY_SEQUENCE = routing.TokenGroups(num_groups=BATCH, min_size=LENGTH)
_DISPATCHES = {
  "gather": dispatch.Dropless(),
  "exchange": dispatch.Dropless(bound=9.0),
  "capacity": dispatch.Capacity(factor=2.0, groups=_BY_SEQUENCE),
  "einsum": dispatch.OneHotEinsum(factor=2.0, groups=_BY_SEQUENCE),
  # No token is dropped, whether one or all of a sequence are in a step.
  "roomy": dispatch.Capacity(minimum=BATCH * LENGTH),
}


def _model(name, **pipeline):
  tiny = models_testing.tiny_decoder()
  block = tiny.stack.blocks[1].clone(
    feed_forward=mixture.MixtureOfExperts(
      num_experts=EXPERTS,
      router=routers.TopK(k=2),
      experts=experts.GatedExperts(mlp_dim=MLP),
      dispatch=_DISPATCHES[name],
    )
  )
  if pipeline:
    layers = spmd_pipeline.PipelinedStack([block], LAYERS, **pipeline)
  else:
    layers = stack.Stack([block], LAYERS)
  return tiny.clone(stack=layers)


_PACKED = models_testing.packed_batch(
  [[6], [2, 4], [3, 2], [1, 5]] * (BATCH // 4), LENGTH
)
_ARGS = models_testing.token_args(_PACKED)


def _gradient(model):
  def loss(values, batch):
    ((total, weight), *_), _ = model.apply(
      values, batch, method="loss", mutable=[auxiliary_loss.COLLECTION]
    )
    return total / weight

  return jax.value_and_grad(loss)


@functools.cache
def _values():
  return layers_testing.random_values(_model("gather"), *_ARGS)


@functools.cache
def _expected(name):
  return jax.jit(_gradient(_model(name)))(_values(), _PACKED)


def _layout(on, stages=1):
  rules = rules_lib.DEFAULT_RULES
  if stages > 1:
    rules = stage_sharding.with_stages(
      rules, num_stages=stages, num_groups=LAYERS
    )
  return layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse(on)), rules)


def _assert_equal(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def _gathered_experts(text):
  """Returns the all-gathers of kernels of experts, by their dimensions."""
  found = re.findall(r"= \(?\w+\[([\d,]*)\].*? all-gather\(", text)
  shapes = [tuple(map(int, sizes.split(","))) for sizes in found if sizes]
  return [s for s in shapes if sorted(s[-2:]) == [EMBED, MLP]]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("name", "on"),
  [
    ("gather", "stage=2,expert=2,tensor=2"),
    ("exchange", "stage=2,expert=4"),
    ("gather", "stage=2,fsdp=2,expert=2"),
    ("capacity", "stage=2,expert=2,tensor=2"),
    ("einsum", "stage=2,expert=4"),
  ],
)
def test_pipelines_give_the_loss_and_gradients_of_a_stack(name, on):
  at = _layout(on, STAGES)
  pipelined = _model(name, num_stages=STAGES, num_microbatches=2)
  specs = layers_testing.specs(_model("gather"), *_ARGS)
  compiled = (
    at.jit(
      _gradient(pipelined),
      in_shardings=(
        at.shardings(specs),
        {key: at.batch_sharding(2) for key in _PACKED},
      ),
    )
    .lower(_values(), _PACKED)
    .compile()
  )
  placed = layers_testing.place(
    (_values(), _PACKED), compiled.input_shardings[0]
  )
  _assert_equal(compiled(*placed), _expected(name))
  if name == "capacity":
    # The design says nothing of its collectives, which the compiler chooses.
    return
  text = compiled.as_text()
  assert (" all-to-all(" in text) == (name in ("exchange", "einsum"))
  # All stages, all local experts, and never those of other devices.
  here = EXPERTS // int(re.search(r"expert=(\d)", on)[1])
  for shape in _gathered_experts(text):
    assert shape[-3] == here, shape


@functools.cache
def _step(name, on):
  apply = functools.partial(_model(name).apply, mutable=["cache"])
  jit = _layout(on).jit if on else jax.jit
  return (
    jit(functools.partial(apply, cache_length=LENGTH, method="prefill")),
    jit(functools.partial(apply, method="decode_step")),
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("on", ["", "expert=4,tensor=2"])
@pytest.mark.parametrize("name", ["gather", "exchange", "roomy"])
def test_decoding_gives_the_forward_pass(name, on):
  inputs = _ARGS[0]
  args = (
    inputs,
    layers_testing.make_positions(*inputs.shape),
    layers_testing.ones(*inputs.shape),
  )
  expected = layers_testing.apply(_model("gather"), _values(), *args)
  prefill, step = _step(name, on)
  logits, cache = prefill(_values(), *(x[:, :3] for x in args))
  found = [np.asarray(logits)]
  for i in range(3, LENGTH):
    token = (x[:, i : i + 1] for x in args)
    logits, cache = step({**_values(), **cache}, *token)
    found.append(np.asarray(logits))
  np.testing.assert_allclose(
    np.concatenate(found, axis=1), expected, rtol=1e-4, atol=1e-5
  )
