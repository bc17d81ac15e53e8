"""Tests for skipped updates, through the train step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import learner as learner_lib
from paxon.learners import (
  loss_function,
  parameter_average,
  schedules,
  skipping,
  testing,
  train_state,
  train_step,
)
from paxon.learners import metrics as metrics_lib
from paxon.learners.optimizers import adamw
from paxon.sharding import variables

REPLACE = variables.UpdateRule.REPLACE
OVERWRITE = variables.UpdateRule.OVERWRITE_WITH_GRADIENT
SPECS = {
  "params": {
    "kernel": testing.spec("params/kernel", (3, 2)),
    "fixed": testing.spec("params/fixed", (2,), trainable=False),
  },
  "fp8": {"scale": testing.spec("fp8/scale", (), update=OVERWRITE)},
  "stats": {"mean": testing.spec("stats/mean", (), update=REPLACE)},
}
SCHEDULE = schedules.WarmupLinear(peak=0.1, warmup_steps=2, total_steps=20)


SKIP = skipping.SkipUpdates()


def _learner(skip=SKIP, **fields):
  return learner_lib.Learner(
    optimizer=adamw.AdamW(schedule=SCHEDULE, weight_decay=0.1),
    max_grad_norm=1.0,
    skip=skip,
    average=parameter_average.ParameterAverage(decay=0.9, debias=True),
    **fields,
  )


@jax.custom_vjp
def _scaled(x, scale, amax):
  """`x`; the gradient of `scale` is `amax`."""
  del scale, amax
  return x


_scaled.defvjp(
  lambda x, scale, amax: (x, amax), lambda amax, g: (g, amax, None)
)


@jax.custom_jvp
def _poisoned(x, factor):
  """`x`, and its gradient is multiplied by `factor`."""
  del factor
  return x


_poisoned.defjvp(
  lambda primals, tangents: (primals[0], tangents[0] * primals[1])
)


def _loss(values, batch, rngs):
  del rngs
  factor = jnp.max(batch["factor"])
  kernel = _poisoned(values["params"]["kernel"], factor)
  x = _scaled(batch["x"], values["fp8"]["scale"], jnp.max(batch["amax"]))
  predicted = x @ kernel + values["params"]["fixed"][None]
  nll = jnp.sum((predicted - batch["y"]) ** 2, axis=-1)
  return train_step.LossOutput(
    loss=metrics_lib.total(nll, weights=batch["weights"]),
    metrics={},
    outputs={},
    new_collections={"stats": {"mean": jnp.mean(batch["x"])}},
  )


def _batch(t, **changes):
  random = np.random.default_rng(t)
  changed = {k: jnp.full((4,), v) for k, v in changes.items()}
  return {
    "x": jax.device_put(np.float32(random.normal(size=(4, 3)))),
    "y": jax.device_put(np.float32(random.normal(size=(4, 2)))),
    "weights": jnp.ones((4,)),
    "factor": jnp.ones((4,)),
    "amax": jnp.full((4,), 2.0),
  } | changed


def _state(learner):
  random = np.random.default_rng(0)
  values = jax.tree.map(
    lambda s: jax.device_put(np.float32(random.normal(size=s.shape))), SPECS
  )
  return train_state.make_initial(values, learner=learner, specs=SPECS)


def _step(learner):
  return jax.jit(
    train_step.make_train_step(_loss, learner=learner, specs=SPECS, seed=0)
  )


def _without_counters(state):
  return {
    "variables": state.variables,
    "opt_state": state.opt_state,
    "average": state.average,
  }


def _assert_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


HARMFUL = {
  "gradient of NaN": {"factor": jnp.nan},
  "infinite gradient": {"factor": jnp.inf},
  "loss of NaN": {"weights": jnp.nan},
  "next value of NaN": {"amax": jnp.nan},
  "too large a gradient": {"factor": 1e6},
}


@functools.cache
def _limited(num_microbatches):
  """A step with a limit, compiled once, and a state after it."""
  learner = _learner(
    skipping.SkipUpdates(above_grad_norm=1e4), num_microbatches=num_microbatches
  )
  step = _step(learner)
  return step, step(_state(learner), _batch(1))[0]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("kind", HARMFUL)
def test_a_harmful_batch_changes_counters_only(kind, num_microbatches):
  step, before = _limited(num_microbatches)
  after, metrics = step(before, _batch(2, **HARMFUL[kind]))
  _assert_equal(_without_counters(after), _without_counters(before))
  assert (int(before.step), int(before.skipped)) == (1, 0)
  assert (int(after.step), int(after.skipped)) == (2, 1)
  assert [float(x) for x in metrics["skipped"]] == [1.0, 1.0]


def test_training_continues_as_without_the_batch():
  learner = _learner()
  step = _step(learner)
  disturbed = undisturbed = _state(learner)
  for t in range(1, 9):
    if t in (3, 4):
      disturbed, _ = step(disturbed, _batch(t, factor=jnp.nan))
      continue
    disturbed, metrics = step(disturbed, _batch(t))
    undisturbed, expected = step(undisturbed, _batch(t))
    # Also the rate that is shown is the rate that is used.
    assert metrics["learning_rate"] == expected["learning_rate"]
  _assert_equal(_without_counters(disturbed), _without_counters(undisturbed))
  assert (int(disturbed.step), int(disturbed.skipped)) == (8, 2)
  assert (int(undisturbed.step), int(undisturbed.skipped)) == (6, 0)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("skip", [None, SKIP], ids=["no skip", "skip"])
def test_batches_without_targets_are_as_if_they_were_not_there(
  skip, num_microbatches
):
  learner = _learner(skip, num_microbatches=num_microbatches, count_tokens=True)
  step = _step(learner)
  disturbed = undisturbed = _state(learner)
  for t in range(1, 8):
    if t in (1, 3, 4):
      before = disturbed
      # NaN times a weight of zero: what a model makes of padding is no matter.
      disturbed, metrics = step(
        disturbed, _batch(t, weights=0.0, factor=jnp.nan if t == 3 else 1.0)
      )
      _assert_equal(_without_counters(disturbed), _without_counters(before))
      assert float(metrics["loss"][1]) == 0
      totals = metrics_lib.Totals()
      totals.add(metrics)
      assert "loss" not in totals.means()
      continue
    disturbed, metrics = step(disturbed, _batch(t))
    undisturbed, expected = step(undisturbed, _batch(t))
    assert metrics["learning_rate"] == expected["learning_rate"]
    assert metrics["tokens_trained"] == expected["tokens_trained"]
  _assert_equal(_without_counters(disturbed), _without_counters(undisturbed))
  assert (int(disturbed.step), int(undisturbed.step)) == (7, 4)
  if skip is not None:
    assert (int(disturbed.skipped), int(undisturbed.skipped)) == (3, 0)


def test_nothing_is_selected_where_each_batch_has_targets():
  learner = _learner(None)
  steps = [
    train_step.make_train_step(
      _loss, learner=learner, specs=SPECS, seed=0, may_lack_targets=may_lack
    )
    for may_lack in (True, False)
  ]
  state, batch = _state(learner), _batch(1)
  _assert_equal(*(jax.jit(step)(state, batch)[0] for step in steps))
  texts = [str(jax.make_jaxpr(step)(state, batch)) for step in steps]
  counts = [text.count("name=_where") for text in texts]
  assert counts[0] - counts[1] >= len(jax.tree.leaves(state.opt_state))


def test_a_metric_of_targets_overrides_the_weight_of_the_loss():
  def loss(values, batch, rngs):
    found = _loss(values, batch, rngs)
    targets = jnp.sum(batch["amax"] > 0, dtype=jnp.float32)
    metrics = {loss_function.TARGETS: (targets, jnp.float32(4))}
    return found._replace(metrics=metrics)

  learner = _learner(None, num_microbatches=2)
  step = jax.jit(
    train_step.make_train_step(loss, learner=learner, specs=SPECS, seed=0)
  )
  plain = _step(learner)
  before = _state(learner)
  # One microbatch without targets counts in the mean.
  some = _batch(1) | {"amax": jnp.asarray([0.0, 1.0, 0.0, 1.0])}
  after, metrics = step(before, some)
  expected, _ = plain(before, some)
  _assert_equal(_without_counters(after), _without_counters(expected))
  assert (float(metrics["loss"][1]), "targets" in metrics) == (4, False)
  again, metrics = step(after, _batch(2, amax=0.0))
  _assert_equal(_without_counters(again), _without_counters(after))
  assert float(metrics["loss"][1]) == 0


def test_without_the_option_nothing_is_skipped_or_stored():
  learner = _learner(None)
  after, metrics = _step(learner)(_state(learner), _batch(1, factor=jnp.nan))
  assert after.skipped is None
  assert "skipped" not in metrics
  assert np.isnan(after.variables["params"]["kernel"]).all()


def test_large_gradients_are_not_skipped_without_a_limit():
  learner = _learner()
  after, _ = _step(learner)(_state(learner), _batch(1, factor=1e6))
  assert int(after.skipped) == 0


def test_the_counter_is_part_of_the_specs():
  specs = train_state.state_specs(SPECS, learner=_learner())
  assert (specs.skipped.name, specs.skipped.shape) == ("skipped", ())
  assert jax.tree.structure(specs) == jax.tree.structure(_state(_learner()))


def test_rejects_a_limit_of_zero():
  with pytest.raises(
    ValueError, match=r"above_grad_norm must be positive, got"
  ):
    skipping.SkipUpdates(above_grad_norm=0.0)
