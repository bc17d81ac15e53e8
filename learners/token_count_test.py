"""Tests for the count of tokens, alone and in the steps of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import (
  constant,
  learner,
  loss_function,
  sgd,
  skipping,
  testing,
  token_count,
  train_state,
  train_step,
)

SPECS = {"params": {"w": testing.spec("params/w", (2,))}}
BATCH = {
  "x": jax.device_put(
    np.float32([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
  ),
  "weights": jax.device_put(np.float32([2.0, 0.0, 3.0, 1.0])),
}


def test_counts_exactly_far_beyond_float32():
  add = jax.jit(token_count.added)
  count, exact = token_count.zero(), 0
  for tokens in (2**30 - 64, 2**20 + 1, 2**30 - 64, 7, 2**30 - 64, 1, 16383):
    count, exact = add(count, jnp.float32(tokens)), exact + tokens
    assert token_count.as_int(count) == exact
    np.testing.assert_allclose(token_count.as_float(count), exact, rtol=1e-6)
  assert exact > 2**31
  assert count.dtype == jnp.int32
  large = jax.device_put(np.int32([2**29, 2**30 - 1]))
  added = token_count.added(large, jnp.float32(3))
  assert token_count.as_int(added) == token_count.as_int(large) + 3


def _loss(variables, batch, rngs):
  del rngs
  weights = batch["weights"]
  loss = jnp.sum((batch["x"] @ variables["params"]["w"]) * weights)
  return loss_function.LossOutput((loss, jnp.sum(weights)), {}, {}, {})


def _run(how, batches):
  values = {"params": {"w": jnp.ones(2)}}
  state = train_state.initial(values, learner=how, specs=SPECS)
  step = jax.jit(
    train_step.make_train_step(_loss, learner=how, specs=SPECS, seed=0)
  )
  metrics = {}
  for batch in batches:
    state, metrics = step(state, batch)
  return state, metrics


def _learner(**fields):
  schedule = constant.Constant(value=0.1)
  return learner.Learner(optimizer=sgd.Sgd(schedule=schedule), **fields)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_steps_count_the_weights_of_their_losses(num_microbatches):
  how = _learner(count_tokens=True, num_microbatches=num_microbatches)
  state, metrics = _run(how, [BATCH] * 3)
  assert token_count.as_int(state.tokens) == 18
  assert metrics["tokens_trained"] == (18, 1)
  specs = train_state.state_specs(SPECS, learner=how)
  assert specs.tokens.shape == state.tokens.shape
  assert specs.tokens.dtype == state.tokens.dtype
  assert specs.tokens.name == "tokens"


def test_a_skipped_update_trains_on_nothing():
  how = _learner(count_tokens=True, skip=skipping.SkipUpdates())
  bad = {**BATCH, "x": BATCH["x"].at[0, 0].set(jnp.nan)}
  state, metrics = _run(how, [BATCH, bad, BATCH])
  assert int(state.skipped) == 1
  assert token_count.as_int(state.tokens) == 12
  assert metrics["tokens_trained"] == (12, 1)


def test_nothing_is_counted_unasked():
  state, metrics = _run(_learner(), [BATCH])
  assert state.tokens is None
  assert "tokens_trained" not in metrics
