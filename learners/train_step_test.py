"""Tests for the train step and the evaluation step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import (
  learner,
  loss_function,
  schedules,
  testing,
  train_state,
  train_step,
)
from paxon.learners import learner as learner_lib
from paxon.learners import metrics as metrics_lib
from paxon.learners.optimizers import adamw, cautious, sgd, sophia
from paxon.sharding import variables

REPLACE = variables.UpdateRule.REPLACE
OVERWRITE = variables.UpdateRule.OVERWRITE_WITH_GRADIENT
SPECS = {
  "params": {
    "kernel": testing.spec("params/kernel", (3, 2)),
    "bias": testing.spec("params/bias", (2,)),
    "fixed": testing.spec("params/fixed", (2,), trainable=False),
  },
  "fp8": {
    "used": testing.spec("fp8/used", (), update=OVERWRITE),
    "unused": testing.spec("fp8/unused", (), update=OVERWRITE),
  },
  "stats": {"mean": testing.spec("stats/mean", (), update=REPLACE)},
}
# Not 0.999, whose float32 bias correction alone is off by 1e-5.
RATE, DECAY, MAX_NORM, B2 = 0.05, 0.1, 0.7, 0.95
LEARNER = learner_lib.Learner(
  optimizer=adamw.AdamW(
    schedule=schedules.WarmupCosine(
      peak=RATE, warmup_steps=0, total_steps=1000, end=RATE
    ),
    b2=B2,
    weight_decay=DECAY,
  ),
  max_grad_norm=MAX_NORM,
)


@jax.custom_vjp
def _scaled(x, scale):
  """`x`; the gradient of `scale` is the largest absolute value of `x`."""
  del scale
  return x


_scaled.defvjp(
  lambda x, scale: (x, jnp.max(jnp.abs(x))), lambda amax, g: (g, amax)
)


def _values():
  random = np.random.default_rng(0)
  values = jax.tree.map(
    lambda s: jax.device_put(np.float32(random.normal(size=s.shape))), SPECS
  )
  values["fp8"] = {"used": jnp.float32(1), "unused": jnp.float32(3)}
  return values


def _batch(step):
  random = np.random.default_rng(100 + step)
  return {
    "x": jax.device_put(np.float32(random.normal(size=(5, 3)))),
    "y": jax.device_put(np.float32(random.normal(size=(5, 2)))),
    "weights": jax.device_put(np.float32(random.random(size=5) < 0.7)),
  }


def _loss(values, batch, rngs):
  """Weighted squared error of a linear model."""
  del rngs
  params = values["params"]
  x = _scaled(batch["x"], values["fp8"]["used"])
  predicted = x @ params["kernel"] + (params["bias"] + params["fixed"])[None]
  nll = jnp.sum((predicted - batch["y"]) ** 2, axis=-1)
  loss = metrics_lib.total(nll, weights=batch["weights"])
  return train_step.LossOutput(
    loss=loss,
    metrics={"twice": (2 * loss[0], loss[1])},
    outputs={"token_nll": nll},
    new_collections={"stats": {"mean": jnp.mean(batch["x"])}},
  )


def _step(loss=_loss, **options):
  return jax.jit(
    train_step.make_train_step(
      loss, learner=LEARNER, specs=SPECS, seed=7, **options
    )
  )


def _state():
  return train_state.make_initial(_values(), learner=LEARNER, specs=SPECS)


def test_twenty_steps_match_float64_numpy():
  state, step = _state(), _step()
  params = {
    k: np.asarray(v, np.float64) for k, v in _values()["params"].items()
  }
  moments = {k: [np.zeros_like(params[k])] * 2 for k in ("kernel", "bias")}
  for t in range(1, 21):
    batch = _batch(t)
    x, y, w = (np.asarray(batch[k], np.float64) for k in ("x", "y", "weights"))
    error = x @ params["kernel"] + params["bias"] + params["fixed"] - y
    loss = np.sum(w * np.sum(error**2, -1)) / np.sum(w)
    by_output = 2 * w[:, None] * error / np.sum(w)
    gradients = {"kernel": x.T @ by_output, "bias": by_output.sum(0)}
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))

    state, metrics = step(state, batch)

    np.testing.assert_allclose(
      metrics["loss"][0] / metrics["loss"][1], loss, rtol=1e-5
    )
    np.testing.assert_allclose(metrics["grad_norm"][0], norm, rtol=1e-5)
    for name, gradient in gradients.items():
      gradient = gradient * min(1.0, MAX_NORM / norm)
      mean, square = moments[name]
      mean = 0.9 * mean + 0.1 * gradient
      square = B2 * square + (1 - B2) * gradient**2
      moments[name] = [mean, square]
      direction = (mean / (1 - 0.9**t)) / (np.sqrt(square / (1 - B2**t)) + 1e-8)
      decay = DECAY if name == "kernel" else 0.0
      params[name] = params[name] - RATE * (direction + decay * params[name])
  for name, value in params.items():
    np.testing.assert_allclose(
      state.variables["params"][name], value, rtol=1e-5, atol=1e-6
    )
  assert int(state.step) == 20


def test_each_variable_follows_its_update_rule():
  batch = _batch(0)
  before = _state()
  after, _ = _step()(before, batch)
  x = np.asarray(batch["x"])
  old, new = before.variables, after.variables
  np.testing.assert_array_equal(new["params"]["fixed"], old["params"]["fixed"])
  assert float(new["fp8"]["used"]) == np.abs(x).max()
  np.testing.assert_allclose(new["stats"]["mean"], x.mean(), rtol=1e-6)


def test_a_scale_with_zero_gradient_is_kept():
  after, _ = _step()(_state(), _batch(0))
  assert float(after.variables["fp8"]["unused"]) == 3.0


def test_overwritten_variables_bypass_clipping_and_optimizer():
  batch = _batch(0)
  _, small = _step()(_state(), batch)
  large = _state()
  large.variables["fp8"]["used"] = jnp.float32(1e6)
  after, metrics = _step()(large, batch)
  assert metrics["grad_norm"] == small["grad_norm"]
  assert metrics["param_norm"] == small["param_norm"]
  assert jax.tree.structure(after) == jax.tree.structure(_state())


def test_padding_does_not_count():
  batch = _batch(1)
  changed = dict(batch)
  padding = (batch["weights"] == 0)[:, None]
  assert padding.any()
  changed["y"] = jnp.where(padding, 1e3, batch["y"])
  a, b = (_step()(_state(), each)[0] for each in (batch, changed))
  np.testing.assert_array_equal(
    a.variables["params"]["kernel"], b.variables["params"]["kernel"]
  )


def test_a_batch_of_padding_is_finite():
  batch = _batch(1) | {"weights": jnp.zeros((5,))}
  state, metrics = _step()(_state(), batch)
  assert metrics["loss"] == (0.0, 0.0)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_metrics():
  metrics = _step(metric_fns=(_count,))(_state(), _batch(1))[1]
  assert set(metrics) == {
    "loss",
    "twice",
    "count",
    "learning_rate",
    "grad_norm",
    "param_norm",
  }
  assert float(metrics["learning_rate"][0]) == np.float32(RATE)
  params = _values()["params"]
  norm = np.sqrt(
    np.sum(np.square(params["kernel"])) + np.sum(np.square(params["bias"]))
  )
  np.testing.assert_allclose(metrics["param_norm"][0], norm, rtol=1e-6)


def test_random_keys_follow_from_seed_and_step():
  def loss(values, batch, rngs):
    result = _loss(values, batch, {})
    noise = jax.random.normal(rngs["dropout"], ())
    return result._replace(metrics={"noise": (noise, jnp.float32(1))})

  state, step = _state(), _step(loss)
  for expected in range(3):
    state, metrics = step(state, _batch(0))
    key = train_state.make_key(7, step=expected, stream="dropout")
    assert metrics["noise"][0] == jax.random.normal(key, ())


def test_evaluation_measures_the_same_without_an_update():
  measure = jax.jit(train_step.make_eval_step(_loss, metric_fns=(_count,)))
  batch = _batch(3)
  measured = measure(_values(), batch)
  _, trained = _step(metric_fns=(_count,))(_state(), batch)
  assert set(measured) == {"loss", "twice", "count"}
  for name, pair in measured.items():
    np.testing.assert_allclose(pair, trained[name], rtol=1e-6)


def test_metric_functions_get_the_outputs_per_example():
  batch = _batch(3) | {"target_bytes": jnp.full((5,), 2, jnp.int32)}
  metric_fns = (metrics_lib.bits_per_byte,)
  measure = train_step.make_eval_step(_loss, metric_fns=metric_fns)
  metrics = measure(_values(), batch)
  bits, source = metrics["bits_per_byte"]
  loss, weight = metrics["loss"]
  assert float(source) == 2 * float(weight)
  np.testing.assert_allclose(bits * np.log(2), loss, rtol=1e-6)


def test_rejects_two_metrics_with_one_name():
  measure = train_step.make_eval_step(_loss, metric_fns=(_count, _count))
  with pytest.raises(ValueError, match=r"Two metrics are called 'count'"):
    measure(_values(), _batch(0))


def _count(batch, outputs):
  return {"count": metrics_lib.total(jnp.ones(5), weights=batch["weights"])}


def _spec(name, update=variables.UpdateRule.OPTIMIZER):
  return variables.VariableSpec(
    name=name,
    shape=(2,),
    dtype=jnp.dtype(jnp.float32),
    axes=(None,),
    update=update,
  )


GROUP_SPECS = {
  "params": {
    "embedding": {"table": _spec("params/embedding/table")},
    "stack": {
      "query": _spec("params/stack/query"),
      "value": _spec("params/stack/value"),
    },
  },
  "stats": {"mean": _spec("stats/mean", variables.UpdateRule.REPLACE)},
}


def _group_values():
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
  groups = train_step.group_by_patterns(patterns, specs=GROUP_SPECS)
  totals = metrics_lib.Totals()
  totals.add(
    train_step.norms(_group_values(), groups=groups, prefix="param_norm")
  )
  return totals.means()


def test_default_groups_are_top_level_modules():
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
def test_rejects_bad_patterns(pattern, message):
  with pytest.raises(ValueError, match=message):
    train_step.group_by_patterns({"q": pattern}, specs=GROUP_SPECS)


@pytest.mark.parametrize("patterns", [None, {}])
def test_group_norms_do_not_change_the_step(patterns):
  def loss_fn(values, batch, rngs):
    del rngs
    params = values["params"]
    total = jnp.sum(params["embedding"]["table"] * batch["x"])
    total += jnp.sum(jnp.square(params["stack"]["query"]))
    loss = total, jnp.float32(1)
    return loss_function.LossOutput(loss, {}, {}, {})

  own = learner.Learner(
    optimizer=sgd.Sgd(schedule=schedules.Constant(value=0.5))
  )
  step = train_step.make_train_step(
    loss_fn, learner=own, specs=GROUP_SPECS, seed=0, norm_groups=patterns
  )
  state = train_state.make_initial(
    _group_values(), learner=own, specs=GROUP_SPECS
  )
  new, metrics = jax.jit(step)(
    state, {"x": jax.device_put(np.float32([6.0, 8.0]))}
  )
  totals = metrics_lib.Totals()
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


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_hardware_random_keys(generator):
  specs = {"params": {"p": testing.spec("params/p", (64,))}}

  def loss_fn(values, batch, rngs):
    del batch
    kept = jax.random.bernoulli(rngs["dropout"], 0.5, (64,))
    loss = jnp.sum(jnp.where(kept, values["params"]["p"], 0)), jnp.float32(1)
    return loss_function.LossOutput(loss, {}, {}, {})

  rule = learner_lib.Learner(
    optimizer=sgd.Sgd(schedule=schedules.Constant(value=1.0)),
    random_generator=generator,
  )
  step = jax.jit(
    train_step.make_train_step(loss_fn, learner=rule, specs=specs, seed=0)
  )
  values = {"params": {"p": jnp.zeros((64,))}}
  state = train_state.make_initial(values, learner=rule, specs=specs)
  first, _ = step(state, {})
  again, _ = step(state, {})
  second, _ = step(first, {})
  masks = [
    np.asarray(s.variables["params"]["p"]) for s in (first, again, second)
  ]
  np.testing.assert_array_equal(masks[0], masks[1])
  # Another mask at the next step, and none that is constant.
  assert 10 < -masks[0].sum() < 54
  assert np.any(masks[2] - masks[0] != masks[0])


def _sophia_learner(**fields):
  return dataclasses.replace(
    LEARNER,
    optimizer=sophia.Sophia(
      schedule=schedules.Constant(value=0.01), hessian_every=2
    ),
    **fields,
  )


def _quartic(values, batch, rngs):
  """A loss with a diagonal Hessian, 12 w x^2 for each element x."""
  del rngs
  flat = jnp.concatenate(
    [values["params"][name].reshape(-1) for name in ("kernel", "bias")]
  )
  loss = metrics_lib.total(
    jnp.sum(flat**4) * batch["weights"], weights=jnp.ones_like(batch["weights"])
  )
  return train_step.LossOutput(loss, {}, {}, {"stats": {"mean": 0.0}})


def test_sophia_gets_the_hessian_of_the_loss():
  learned = _sophia_learner()
  state = train_state.make_initial(_values(), learner=learned, specs=SPECS)
  step = jax.jit(
    train_step.make_train_step(_quartic, learner=learned, specs=SPECS, seed=7)
  )
  found = {"kernel": 0.0, "bias": 0.0}
  for t in range(5):
    values, batch = jax.device_get(state.variables["params"]), _batch(t)
    state, _ = step(state, batch)
    if t % 2 == 0:
      for name in found:
        exact = 12 * np.mean(batch["weights"]) * values[name] ** 2
        found[name] = 0.99 * found[name] + 0.01 * exact
  for name, h in found.items():
    actual = state.opt_state[0].nu["params"][name]
    np.testing.assert_allclose(actual, h, rtol=1e-5)


def test_estimates_of_sophia_have_the_mean_of_the_diagonal():
  random = np.random.default_rng(0)
  matrix = jnp.asarray(random.normal(size=(4, 4)), jnp.float32)
  matrix += matrix.T
  estimate = jax.jit(
    jax.vmap(
      lambda key: sophia.Sophia(
        schedule=schedules.Constant(value=1.0)
      ).estimate_hessian(lambda x: x @ matrix @ x / 2, jnp.ones(4), key=key)
    )
  )
  mean = estimate(jax.random.split(jax.random.key(0), 20_000)).mean(0)
  np.testing.assert_allclose(mean, np.diag(matrix), atol=0.06)


def test_sophia_uses_the_first_microbatch():
  learned = _sophia_learner(num_microbatches=2)
  batch = {k: x[:4] for k, x in _batch(3).items()}
  states = []
  for changed in (batch, {k: x.at[1].set(9.0) for k, x in batch.items()}):
    state = train_state.make_initial(_values(), learner=learned, specs=SPECS)
    step = train_step.make_train_step(
      _loss, learner=learned, specs=SPECS, seed=7
    )
    states.append(jax.jit(step)(state, changed)[0])
  one, other = (state.opt_state[0] for state in states)
  jax.tree.map(np.testing.assert_array_equal, one.nu, other.nu)
  assert not np.array_equal(
    one.mu["params"]["bias"], other.mu["params"]["bias"]
  )


def test_sophia_rejects_a_loss_that_is_not_whole():
  with pytest.raises(ValueError, match="Sophia needs second derivatives"):
    train_step.make_train_step(
      _loss,
      learner=_sophia_learner(),
      specs=SPECS,
      seed=7,
      gradient_fn=lambda *_: None,
    )


def test_sophia_within_another_optimizer_is_an_error():
  learned = dataclasses.replace(
    LEARNER, optimizer=cautious.Cautious(optimizer=_sophia_learner().optimizer)
  )
  state = train_state.make_initial(_values(), learner=learned, specs=SPECS)
  step = train_step.make_train_step(_loss, learner=learned, specs=SPECS, seed=7)
  with pytest.raises(ValueError, match="do not put Sophia into another"):
    step(state, _batch(0))
