"""Tests for learners."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import learner as learner_lib
from paxon.learners import optimizer_state, privacy, testing
from paxon.sharding import variables

SPECS = {
  "params": {
    "a": testing.spec("params/a", (2, 2)),
    "b": testing.spec("params/b", (3,)),
    "frozen": testing.spec("params/frozen", (4,), trainable=False),
  },
  "stats": {
    "mean": testing.spec("stats/mean", (), update=variables.UpdateRule.REPLACE)
  },
}


class _Sgd:
  """p <- p - g with a state, and remembers which specs it got."""

  def __init__(self):
    self.schedule = lambda step: 0.5 * step
    self.specs = None

  def transform(self, specs=None):
    self.specs = specs
    return optax.sgd(1.0, momentum=0.0)


def _updates(max_grad_norm, gradients):
  learner = learner_lib.Learner(optimizer=_Sgd(), max_grad_norm=max_grad_norm)
  transform = learner.transform(SPECS)
  updates, _ = jax.jit(lambda g: transform.update(g, transform.init(g), g))(
    gradients
  )
  return updates["params"]


def _gradients(scale):
  random = np.random.default_rng(0)
  return {
    "params": {
      "a": jax.device_put(np.float32(scale * random.normal(size=(2, 2)))),
      "b": jax.device_put(np.float32(scale * random.normal(size=3))),
    }
  }


@pytest.mark.parametrize("scale", [0.001, 10.0], ids=["below", "above"])
def test_clips_by_the_norm_over_all_variables(scale):
  gradients = _gradients(scale)
  leaves = [np.asarray(g, np.float64) for g in jax.tree.leaves(gradients)]
  norm = np.sqrt(sum(np.sum(g**2) for g in leaves))
  expected = [-g * min(1.0, 1.5 / norm) for g in leaves]
  actual = jax.tree.leaves(_updates(1.5, gradients))
  for a, e in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-6)


def test_clips_each_variable_before_the_global_norm():
  gradients = _gradients(10.0)
  learner = learner_lib.Learner(
    optimizer=_Sgd(), max_variable_grad_norm=2.0, max_grad_norm=1.5
  )
  transform = learner.transform(SPECS)
  updates, _ = jax.jit(lambda g: transform.update(g, transform.init(g), g))(
    gradients
  )
  # Both are longer than 2, so together they are 2 sqrt(2).
  for name, g in gradients["params"].items():
    g = np.asarray(g, np.float64)
    expected = -1.5 / np.sqrt(2) * g / np.sqrt(np.sum(g**2))
    np.testing.assert_allclose(updates["params"][name], expected, rtol=1e-6)


def test_without_clipping_gradients_are_unchanged():
  gradients = _gradients(1000.0)
  updates = _updates(None, gradients)
  np.testing.assert_array_equal(updates["b"], -gradients["params"]["b"])


def test_clipping_does_not_change_the_names_of_the_state():
  specs = [
    optimizer_state.specs(
      learner_lib.Learner(optimizer=_Sgd(), max_grad_norm=norm).transform(
        SPECS
      ),
      {"params": {"a": SPECS["params"]["a"]}},
    )
    for norm in (None, 1.0)
  ]
  assert specs[0] == specs[1]
  assert [s.name for s in jax.tree.leaves(specs[0])] == [
    "opt_state/0/trace/params/a"
  ]


def test_optimizer_receives_only_optimized_variables():
  optimizer = _Sgd()
  learner_lib.Learner(optimizer=optimizer).transform(SPECS)
  assert jax.tree.map(lambda s: s.name, optimizer.specs) == {
    "params": {"a": "params/a", "b": "params/b"}
  }


def test_learning_rate_is_float32():
  rate = learner_lib.Learner(optimizer=_Sgd()).learning_rate(3)
  assert (rate.dtype, float(rate)) == (jnp.float32, 1.5)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("max_grad_norm", 0.0),
    ("max_variable_grad_norm", -1.0),
    ("num_microbatches", 0),
  ],
)
def test_rejects(field, value):
  message = rf"Learner.{field} must be positive, got {value}"
  with pytest.raises(ValueError, match=message):
    learner_lib.Learner(optimizer=_Sgd(), **{field: value})


@pytest.mark.parametrize(
  ("pattern", "decayed"),
  [
    (None, {"params/a"}),
    (".*", {"params/a", "params/b"}),
    ("params/b", {"params/b"}),
  ],
)
def test_decay_applies_to_the_variables_that_match(pattern, decayed):
  optimizer = _Sgd()
  learner_lib.Learner(optimizer=optimizer, decayed_variables=pattern).transform(
    SPECS
  )
  found = jax.tree.leaves(optimizer.specs)
  assert {spec.name for spec in found if spec.regularized} == decayed


def test_rejects_patterns_of_decay_that_match_nothing():
  learner = learner_lib.Learner(optimizer=_Sgd(), decayed_variables="b")
  with pytest.raises(ValueError, match="'b' matches no variable, such as"):
    learner.transform(SPECS)
  with pytest.raises(ValueError, match="must be a regular expression"):
    learner_lib.Learner(optimizer=_Sgd(), decayed_variables="(")


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"measure_noise": True}, "num_microbatches must be at least 2, got 1"),
    ({"random_generator": "philox"}, "must be one of threefry2x32, rbg"),
    (
      {
        "measure_noise": True,
        "num_microbatches": 2,
        "privacy": privacy.Privacy(clip_norm=1.0, noise_multiplier=1.0),
      },
      "uses gradients without noise",
    ),
  ],
)
def test_wrong_options(fields, message):
  with pytest.raises(ValueError, match=message):
    learner_lib.Learner(optimizer=_Sgd(), **fields)
