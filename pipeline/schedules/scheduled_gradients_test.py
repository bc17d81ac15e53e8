"""Tests that a schedule's step is a learner's that accumulates."""

import functools
import itertools

from flax import linen as nn
import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.stacks import stack
from paxon.pipeline.schedules import (
  generators,
  linen_testing,
  lowering,
  scheduled_stack,
  testing,
)
from paxon.sharding import variables

# Stages, microbatches, and mesh axes for rows and for weights.
_SIZES = (
  (2, 4, "data=2,tensor=2"),
  (4, 4, "data=2"),
  (2, 2, "fsdp=2,tensor=2"),
  (4, 4, "tensor=2"),
  (2, 4, "tensor=2"),
  (2, 2, ""),
  (1, 2, ""),
)


def _is_possible(case):
  """Whether no stage would be without layers."""
  name, (stages, *_), num_layers, *_ = case
  made = generators.find(name)(num_stages=stages, num_microbatches=4)
  return stages * made.num_chunks <= num_layers


# All schedules; layers that divide by the stages, and that do not; tied and
# not; what forward operations keep.
_CASES = tuple(
  filter(
    _is_possible,
    itertools.product(
      sorted(generators.SCHEDULES),
      _SIZES,
      (5, 4),
      (True, False),
      lowering.Residuals,
    ),
  )
)


@functools.cache
def _expected(num_layers, microbatches, tied):
  """Variables, their specs, and what a learner computes without stages."""
  block = linen_testing.block(tied=tied)
  plain = linen_testing.make_model(stack.Stack((block,), num_layers))
  values, specs = linen_testing.make_variables(plain)
  want = linen_testing.compute_accumulated(
    plain, microbatches, values=values, specs=specs
  )
  return values, specs, want


# The same cases each time; each is a program to compile.
@hypothesis.settings(
  max_examples=6,
  database=None,
  # A case says enough; a simpler one would be compiled for minutes.
  phases=(hypothesis.Phase.generate,),
  suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(case=strategies.sampled_from(_CASES))
def test_a_step_is_that_of_an_accumulating_learner(case):
  name, (stages, microbatches, beside), num_layers, tied, residuals = case
  values, specs, want = _expected(num_layers, microbatches, tied)
  own = _stack(
    generators.find(name),
    stages,
    microbatches,
    num_layers,
    tied=tied,
    residuals=residuals,
  )
  got = linen_testing.compute_scheduled(
    linen_testing.make_model(own),
    f"stage={stages}" + f",{beside}" * bool(beside),
    values=values,
    specs=specs,
  )
  assert jax.tree.leaves(got[1])
  linen_testing.assert_equal(got, want)


def _stack(make, stages, microbatches, num_layers, *, tied=False, **fields):
  made = make(num_stages=stages, num_microbatches=microbatches)
  return scheduled_stack.ScheduledStack(
    (linen_testing.block(tied=tied),),
    num_layers,
    num_stages=stages,
    num_microbatches=microbatches,
    circular_repeats=made.num_chunks,
    schedule=make,
    **fields,
  )


def _table_of_two(*, num_stages, num_microbatches):
  del num_microbatches
  return testing.gpipe(num_stages=num_stages, num_microbatches=2)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    pytest.param(
      {"streaming": True, "num_microbatches": 2},
      r"streaming must be False",
      id="streaming",
    ),
    pytest.param(
      {"schedule": generators.interleaved_two_slots, "num_microbatches": 2},
      r"circular_repeats \(1\) must be 2: schedule 'interleaved two-slot, 2"
      r" chunks' has 2 chunks on each stage",
      id="chunks",
    ),
    pytest.param(
      {"schedule": _table_of_two, "num_microbatches": 4},
      r"num_microbatches \(4\) must be 2: schedule 'GPipe' has 2 microba",
      id="other-table",
    ),
    pytest.param(
      {"blocks": 2, "num_layers": 5, "num_microbatches": 2},
      r"num_layers \(5\) must be a multiple of its 2 blocks; 1 layers",
      id="rest",
    ),
  ],
)
def test_rejects_stacks_that_do_not_fit(fields, message):
  blocks = (linen_testing.block(),) * fields.pop("blocks", 1)
  given = {"num_layers": 4, "num_stages": 2, **fields}
  with pytest.raises(ValueError, match=message):
    scheduled_stack.ScheduledStack(blocks, **given)


def test_rejects_variables_that_microbatches_cannot_combine():
  def spec(**fields):
    made = variables.VariableSpec(
      name="statistics/mean",
      shape=(1,),
      dtype=np.dtype("float32"),
      axes=(None,),
      **fields,
    )
    return {"statistics": {"mean": made}}

  rule, combine = variables.UpdateRule, variables.CombineRule
  own = _stack(testing.gpipe, 2, 2, 2)
  for fields, message in (
    ({"update": rule.REPLACE}, r"statistics/mean is replaced by the forward"),
    (
      {"update": rule.OVERWRITE_WITH_GRADIENT, "combine": combine.MEAN},
      r"is overwritten with its gradient and combined by MEAN",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      linen_testing.gradient_fn(linen_testing.make_model(own), spec(**fields))


def test_rejects_arguments_with_gradients():
  class Wrong(linen_testing.Model):
    @nn.compact
    def loss(self, batch, *, deterministic=False):
      """Gives layers the table's numbers."""
      table = self.param(
        "table", nn.initializers.ones, (linen_testing.VOCAB, 4)
      )
      x = table[batch["ids"]]
      x = self.stack(x, x, deterministic=deterministic)
      return (jnp.sum(x), jnp.float32(1)), {}, {}

  own = _stack(testing.gpipe, 2, 2, 2)
  plain = linen_testing.make_model(stack.Stack((linen_testing.block(),), 2))
  values, specs = linen_testing.make_variables(plain)
  run = own.make_gradient_fn(
    Wrong(own), loss_fn_of=linen_testing.loss_fn, metric_fns=(), specs=specs
  )
  with pytest.raises(ValueError, match=r"args/0 of dtype float32; with a sche"):
    jax.eval_shape(
      linen_testing.make_value_gradient_fn(run, specs),
      values,
      linen_testing.batch(),
      {},
    )
