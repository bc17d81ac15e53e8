"""Tests of clipping and noise, compared with optax, and of their errors."""

import functools
import re

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import (
  gradients,
  learner,
  loss_function,
  privacy,
  private_gradients,
  schedules,
  testing,
  train_state,
  train_step,
)
from paxon.learners.optimizers import sgd
from paxon.sharding import variables

STACKED = (("layers", 1),)
SPECS = {
  "params": {
    "kernels": testing.spec("params/kernels", (2, 3, 3), stacked=STACKED),
    "bias": testing.spec("params/bias", (3,)),
  }
}
Clipping = privacy.Clipping


def _loss_fn(values, batch, rngs):
  del rngs
  x = batch["x"]
  for kernel in values["params"]["kernels"]:
    x = jnp.tanh(x @ kernel)
  errors = jnp.sum(jnp.square(x + values["params"]["bias"][None]), axis=-1)
  weights = batch["weights"]
  loss = jnp.sum(errors * weights), jnp.sum(weights)
  return loss_function.LossOutput(loss, {}, {}, {})


def _draw(shape, seed):
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


VALUES = {"params": {"kernels": _draw((2, 3, 3), 0), "bias": _draw((3,), 1)}}
BATCH = {
  "x": 2 * _draw((8, 3), 2),
  "weights": jnp.asarray([1, 2, 1, 0, 1, 1, 1, 1], jnp.float32),
}


@functools.partial(jax.jit, static_argnames=("settings", "num_microbatches"))
def _run(settings, *, num_microbatches=1, step=0):
  fn = private_gradients.make_gradient_fn(
    _loss_fn,
    metric_fns=(),
    privacy=settings,
    num_microbatches=num_microbatches,
    specs=SPECS,
  )
  variables = gradients.Variables(params=VALUES, overwritten={}, constant={})
  key = train_state.make_key(0, step=step, stream=privacy.STREAM)
  return fn(variables, BATCH, {privacy.STREAM: key}).params


def _example_gradients():
  """Returns the gradient of each example by its layers, as optax takes them."""

  def loss(values, example):
    one = jax.tree.map(lambda x: x[None], example)
    total, weight = _loss_fn(values, one, {}).loss
    return total / jnp.where(weight == 0, 1, weight)

  found = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(VALUES, BATCH)["params"]
  kernels = found["kernels"]
  return {"a": kernels[:, 0], "b": kernels[:, 1], "bias": found["bias"]}


def _unstack(found):
  kernels = found["params"]["kernels"]
  return {"a": kernels[0], "b": kernels[1], "bias": found["params"]["bias"]}


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(
  ("clipping", "clip"),
  [
    (
      Clipping.PER_EXAMPLE,
      lambda leaves: optax.per_example_global_norm_clip(leaves, 0.7),
    ),
    (
      Clipping.PER_LAYER,
      lambda leaves: optax.per_example_layer_norm_clip(
        leaves, 0.7, uniform=True
      ),
    ),
    (
      Clipping.PER_LAYER_SCALED,
      lambda leaves: optax.per_example_layer_norm_clip(
        leaves, 0.7, uniform=False
      ),
    ),
  ],
)
def test_clipping_matches_optax(clipping, clip, num_microbatches):
  settings = privacy.Privacy(
    clip_norm=0.7, noise_multiplier=0.0, clipping=clipping
  )
  found = _unstack(_run(settings, num_microbatches=num_microbatches))
  leaves, treedef = jax.tree.flatten(_example_gradients())
  sums, num_clipped = clip(leaves)
  assert 0 < int(np.max(num_clipped)) < 8
  expected = jax.tree.unflatten(treedef, [x / 8 for x in sums])
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
    found,
    expected,
  )


def test_groups_of_examples_are_clipped_as_one():
  settings = privacy.Privacy(
    clip_norm=0.3, noise_multiplier=0.0, examples_per_clip=2
  )
  found = _run(settings, num_microbatches=2)
  total = 0
  for i in range(0, 8, 2):

    def loss(values, i=i):
      group = {k: x[i : i + 2] for k, x in BATCH.items()}
      total, weight = _loss_fn(values, group, {}).loss
      return total / weight

    g = np.concatenate(
      [np.ravel(x) for x in jax.tree.leaves(jax.jit(jax.grad(loss))(VALUES))]
    ).astype(np.float64)
    total += g * min(1, 0.3 / np.linalg.norm(g)) / 4
  actual = np.concatenate([np.ravel(x) for x in jax.tree.leaves(found)])
  np.testing.assert_allclose(actual, total, rtol=1e-5, atol=1e-7)


def test_noise_has_the_scale_and_differs_between_steps_and_variables():
  clean = privacy.Privacy(clip_norm=0.5, noise_multiplier=0.0)
  noisy = privacy.Privacy(clip_norm=0.5, noise_multiplier=3.0)
  mean = _run(clean)
  draws = []
  for step in range(16):
    found = jax.tree.map(jnp.subtract, _run(noisy, step=step), mean)
    draws.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(found)]))
  draws = np.array(draws)
  # 21 numbers in 16 steps: the standard error of the deviation is 3.9 %.
  np.testing.assert_allclose(draws.std(), 0.5 * 3.0 / 8, rtol=0.16)
  assert abs(draws.mean()) < 4 * draws.std() / np.sqrt(draws.size)
  assert len(np.unique(draws)) == draws.size
  # The same at the same step, with any number of microbatches.
  again = _run(noisy, num_microbatches=2, step=0)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    again,
    _run(noisy, step=0),
  )


def test_train_step_reports_clipping():
  rule = learner.Learner(
    optimizer=sgd.Sgd(schedule=schedules.Constant(value=0.1)),
    privacy=privacy.Privacy(clip_norm=0.7, noise_multiplier=1.0),
  )
  step = train_step.make_train_step(
    _loss_fn, learner=rule, specs=SPECS, seed=0, streams=()
  )
  state = train_state.make_initial(VALUES, learner=rule, specs=SPECS)
  new, metrics = jax.jit(step)(state, BATCH)
  clipped, count = metrics["privacy/clipped"]
  assert 0 < clipped < count == 8
  # The loss is that of the batch.
  total, weight = _loss_fn(VALUES, BATCH, {}).loss
  np.testing.assert_allclose(metrics["loss"][0], total, rtol=1e-6)
  np.testing.assert_allclose(metrics["loss"][1], weight)
  assert int(new.step) == 1
  # Without targets the update is noise: leaving it out would disclose that.
  empty = {**BATCH, "weights": jnp.zeros_like(BATCH["weights"])}
  noisy, metrics = jax.jit(step)(state, empty)
  assert float(metrics["loss"][1]) == 0
  kernels = noisy.variables["params"]["kernels"]
  assert np.all(np.isfinite(kernels))
  assert np.all(kernels != VALUES["params"]["kernels"])


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"clip_norm": 0.0}, "Privacy.clip_norm must be positive, got 0.0"),
    ({"noise_multiplier": -1.0}, "noise_multiplier must not be negative"),
    ({"delta": 1.0}, "Privacy.delta must be in (0, 1), got 1.0"),
    ({"num_examples": 1000, "delta": 0.01}, "less than 1 / num_examples"),
    ({"examples_per_clip": 0}, "examples_per_clip must be positive"),
    ({"materialized": ("(",)}, "must be a regular expression"),
  ],
)
def test_wrong_settings(fields, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    privacy.Privacy(**{"clip_norm": 1.0, "noise_multiplier": 1.0} | fields)


def test_wrong_models_and_batches():
  settings = privacy.Privacy(
    clip_norm=1.0, noise_multiplier=1.0, examples_per_clip=3
  )
  with pytest.raises(ValueError, match=r"8 examples .* not a multiple of 3"):
    _run(settings)

  def make(settings, specs):
    return private_gradients.make_gradient_fn(
      _loss_fn, metric_fns=(), privacy=settings, num_microbatches=1, specs=specs
    )

  mean = testing.spec("stats/mean", (), update=variables.UpdateRule.REPLACE)
  with pytest.raises(ValueError, match="stats/mean is replaced in each step"):
    make(settings, {**SPECS, "stats": {"mean": mean}})
  ghost = privacy.Privacy(
    clip_norm=1.0,
    noise_multiplier=1.0,
    clipping=Clipping.GHOST,
    max_materialized_size=4,
  )
  with pytest.raises(ValueError, match=r"params/kernels, .* which has none"):
    make(ghost, SPECS)


def test_ghost_clipping_may_compute_gradients():
  settings = privacy.Privacy(
    clip_norm=0.7,
    noise_multiplier=0.0,
    clipping=Clipping.GHOST,
    max_materialized_size=3,
    materialized=("params/kernels",),
  )
  expected = _run(privacy.Privacy(clip_norm=0.7, noise_multiplier=0.0))
  flat = traverse_util.flatten_dict(_run(settings))
  for path, x in traverse_util.flatten_dict(expected).items():
    np.testing.assert_allclose(flat[path], x, rtol=1e-5, atol=1e-7)
