"""Tests for norms by groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import (
  constant,
  learner,
  loss_function,
  norm_groups,
  sgd,
  train_state,
  train_step,
  weighted,
)
from paxon.sharding import variables


def _spec(name, update=variables.UpdateRule.OPTIMIZER):
  return variables.VariableSpec(
    name=name,
    shape=(2,),
    dtype=jnp.dtype(jnp.float32),
    axes=(None,),
    update=update,
  )


SPECS = {
  "params": {
    "embedding": {"table": _spec("params/embedding/table")},
    "stack": {
      "query": _spec("params/stack/query"),
      "value": _spec("params/stack/value"),
    },
  },
  "stats": {"mean": _spec("stats/mean", variables.UpdateRule.REPLACE)},
}


def _values():
  return {
    "params": {
      "embedding": {"table": jax.device_put(np.float32([3.0, 4.0]))},
      "stack": {
        "query": jax.device_put(np.float32([1.0, 2.0])),
        "value": jax.device_put(np.float32([2.0, 4.0])),
      },
    },
    "stats": {"mean": jnp.zeros(2)},
  }


def _shown(patterns):
  groups = norm_groups.of_patterns(patterns, specs=SPECS)
  totals = weighted.Totals()
  totals.add(norm_groups.norms(_values(), groups=groups, prefix="param_norm"))
  return totals.means()


def test_groups_are_the_modules_at_the_top():
  assert _shown({}) == {
    "param_norm/embedding": 5.0,
    "param_norm/stack": 5.0,
  }


def test_patterns_match_whole_names():
  assert _shown({"query": ".*/query", "all": "params/.*"}) == {
    "param_norm/query": pytest.approx(5**0.5),
    "param_norm/all": pytest.approx(50**0.5),
  }


@pytest.mark.parametrize(
  ("pattern", "message"),
  [
    (
      "query",
      r"'query' of the norm group 'q' matches no variable; it",
    ),
    ("stats/.*", r"'stats/.\*' of the norm group 'q' matches no variable"),
    ("(", r"norm group 'q' must be a regular expression, got '\('"),
  ],
)
def test_patterns_that_cannot_be_meant(pattern, message):
  with pytest.raises(ValueError, match=message):
    norm_groups.of_patterns({"q": pattern}, specs=SPECS)


@pytest.mark.parametrize("patterns", [None, {}])
def test_a_step_tells_them_and_computes_the_same(patterns):
  def loss_fn(values, batch, rngs):
    del rngs
    params = values["params"]
    total = jnp.sum(params["embedding"]["table"] * batch["x"])
    total += jnp.sum(jnp.square(params["stack"]["query"]))
    loss = total, jnp.float32(1)
    return loss_function.LossOutput(loss, {}, {}, {})

  own = learner.Learner(
    optimizer=sgd.Sgd(schedule=constant.Constant(value=0.5))
  )
  step = train_step.make_train_step(
    loss_fn, learner=own, specs=SPECS, seed=0, norm_groups=patterns
  )
  state = train_state.initial(_values(), learner=own, specs=SPECS)
  new, metrics = jax.jit(step)(
    state, {"x": jax.device_put(np.float32([6.0, 8.0]))}
  )
  totals = weighted.Totals()
  totals.add(metrics)
  told = {k: v for k, v in totals.means().items() if "norm/" in k}
  expected = {
    "grad_norm/embedding": 10.0,
    "grad_norm/stack": pytest.approx(20**0.5),
    "param_norm/embedding": 5.0,
    "param_norm/stack": 5.0,
  }
  assert told == ({} if patterns is None else expected)
  np.testing.assert_allclose(
    new.variables["params"]["embedding"]["table"], [0.0, 0.0]
  )
