"""Tests of several learners in one task, and of their train programs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import (
  learner,
  learner_groups,
  loss_function,
  parameter_average,
  privacy,
  schedules,
  skipping,
  testing,
  train_program,
  train_state,
)
from paxon.learners.optimizers import adamw, optax_optimizer, sgd
from paxon.sharding import variables

DIM = 3
SPECS = {
  "params": {
    "discriminator": {
      "b": testing.spec("params/discriminator/b", (1, 1)),
      "w": testing.spec("params/discriminator/w", (DIM, 1)),
    },
    "generator": {"a": testing.spec("params/generator/a", (2, DIM))},
  }
}


def _values():
  random = np.random.default_rng(0)
  return jax.tree.map(
    lambda spec: jnp.asarray(random.normal(size=spec.shape), jnp.float32), SPECS
  )


def _batch(step):
  random = np.random.default_rng([1, step])
  return {
    "real": jnp.asarray(random.normal(size=(8, DIM)) + 2, jnp.float32),
    "noise": jnp.asarray(random.normal(size=(8, 2)), jnp.float32),
  }


def _losses(params, batch):
  """Non-saturating GAN losses of a linear generator and discriminator."""
  d, g = params["discriminator"], params["generator"]
  score = lambda x: x @ d["w"] + d["b"]  # noqa: E731
  fake = batch["noise"] @ g["a"]
  loss_d = jax.nn.softplus(-score(batch["real"])) + jax.nn.softplus(score(fake))
  return jnp.mean(loss_d), jnp.mean(jax.nn.softplus(-score(fake)))


def _loss_fn(values, batch, rngs):
  """The model's loss; metrics have the losses of both networks."""
  del rngs
  loss_d, loss_g = _losses(values["params"], batch)
  weight = jnp.float32(len(batch["real"]))
  metrics = {
    "d": (loss_d * weight, weight),
    "g": (loss_g * weight, weight),
  }
  return loss_function.LossOutput(
    ((loss_d + loss_g) * weight, weight), metrics, {}, {}
  )


def _rate(value):
  return schedules.WarmupCosine(peak=value, warmup_steps=2, total_steps=10)


def _groups(**fields: Any):
  """Adam for the discriminator, clipped SGD with momentum for the other."""
  given: dict[str, Any] = {
    "d_fields": {},
    "g_fields": {},
    "d_every": 1,
    "g_every": 1,
    "program": learner_groups.InTurn(),
  } | fields
  return learner_groups.LearnerGroups(
    groups=(
      learner_groups.LearnerGroup(
        name="discriminator",
        pattern="params/discriminator/.*",
        learner=learner.Learner(
          optimizer=adamw.AdamW(schedule=_rate(0.1)),
          losses={"d": 1.0},
          **given["d_fields"],
        ),
        every_steps=given["d_every"],
      ),
      learner_groups.LearnerGroup(
        name="generator",
        pattern="params/generator/.*",
        learner=learner.Learner(
          optimizer=sgd.Sgd(schedule=_rate(0.3), momentum=0.9),
          losses={"g": 1.0},
          max_grad_norm=0.2,
          **given["g_fields"],
        ),
        every_steps=given["g_every"],
      ),
    ),
    program=given["program"],
  )


def _train(groups, *, steps=10, loss_fn=_loss_fn, state=None, seed=0):
  step = jax.jit(
    train_program.make_train_step(
      loss_fn, learner=groups, specs=SPECS, seed=seed
    )
  )
  if state is None:
    state = train_state.make_initial(_values(), learner=groups, specs=SPECS)
  history = []
  for number in range(int(state.step), steps):
    state, metrics = step(state, _batch(number))
    history.append({k: (float(a), float(b)) for k, (a, b) in metrics.items()})
  return state, history


@jax.numpy_dtype_promotion("standard")
def _optax_loop(order, *, simultaneous=False, every=(1, 1), steps=10):
  """Returns parameters of the loop that a user of optax writes by hand."""
  params = _values()["params"]
  transforms = {
    "discriminator": optax.adamw(
      _rate(0.1), b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0
    ),
    "generator": optax.chain(
      optax.clip_by_global_norm(0.2), optax.sgd(_rate(0.3), momentum=0.9)
    ),
  }
  states = {n: t.init(params[n]) for n, t in transforms.items()}
  index = {"discriminator": 0, "generator": 1}
  for number in range(steps):
    batch, before = _batch(number), params
    for name in order:
      if (number + 1) % every[index[name]]:
        continue
      at = before if simultaneous else params
      gradient = jax.grad(
        lambda own, name=name, at=at, batch=batch: _losses(
          {**at, name: own}, batch
        )[index[name]]
      )(at[name])
      updates, states[name] = transforms[name].update(
        gradient, states[name], params[name]
      )
      params = {**params, name: optax.apply_updates(params[name], updates)}
  return params


def _assert_close(found, expected, rtol=2e-5):
  for a, b in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(
  ("simultaneous", "every"),
  [(False, (1, 1)), (True, (1, 1)), (False, (1, 3)), (True, (2, 1))],
  ids=["in_turn", "simultaneous", "rare_generator", "rare_discriminator"],
)
def test_adversarial_updates_are_those_of_an_optax_loop(simultaneous, every):
  groups = _groups(
    d_every=every[0],
    g_every=every[1],
    program=learner_groups.InTurn(simultaneous=simultaneous),
  )
  state, history = _train(groups)
  order = ("discriminator", "generator")
  expected = _optax_loop(order, simultaneous=simultaneous, every=every)
  _assert_close(state.variables["params"], expected)
  for name, number in zip(order, every, strict=True):
    weights = [h[f"{name}/loss"][1] for h in history]
    due = [(step + 1) % number == 0 for step in range(10)]
    assert [w > 0 for w in weights] == due
    rates = [h[f"{name}/learning_rate"][0] for h in history]
    peak = {"discriminator": 0.1, "generator": 0.3}[name]
    made = iter(range(10))
    for rate, is_due in zip(rates, due, strict=True):
      wanted = float(_rate(peak)(next(made))) if is_due else 0
      np.testing.assert_allclose(rate, wanted, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class _Critic:
  """Several discriminator steps, each on its part of the batch."""

  repeats: int = 2

  def run_step(self, updates, state, batch):
    """Makes a step."""
    metrics = {}
    for i in range(self.repeats):
      part = jax.tree.map(lambda x, i=i: x[i :: self.repeats], batch)
      state, metrics["discriminator"] = updates["discriminator"](
        state, part, index=i
      )
    state, metrics["generator"] = updates["generator"](state, batch)
    return state, metrics


def test_an_own_program_makes_several_updates_in_a_step():
  state, history = _train(_groups(program=_Critic()), steps=5)
  _assert_close(state.variables["params"], _critic_loop())
  assert int(state.step) == 5
  last = history[-1]
  losses = [last[f"{n}/loss"] for n in ("discriminator", "generator")]
  total, weight = last["loss"]
  assert weight == 8
  np.testing.assert_allclose(
    total / weight, sum(a / b for a, b in losses), rtol=1e-6
  )


class _Extragradient:
  """Updates at the point that a first, discarded update reaches."""

  def run_step(self, updates, state, batch):
    """Makes a step."""
    ahead, metrics = state, {}
    for update in updates.values():
      ahead, _ = update(ahead, batch, at=state)
    for name, update in updates.items():
      state, metrics[name] = update(state, batch, index=1, at=ahead)
    return state, metrics


def test_updates_at_another_state_start_from_the_first():
  state, _ = _train(_groups(program=_Extragradient()), steps=5)
  _assert_close(state.variables["params"], _extragradient_loop())


@jax.numpy_dtype_promotion("standard")
def _extragradient_loop():
  params = _values()["params"]
  transforms = (
    ("discriminator", optax.adamw(_rate(0.1), weight_decay=0.0)),
    (
      "generator",
      optax.chain(
        optax.clip_by_global_norm(0.2), optax.sgd(_rate(0.3), momentum=0.9)
      ),
    ),
  )
  states = {n: t.init(params[n]) for n, t in transforms}
  for number in range(5):
    ahead = params
    for _ in range(2):
      moved, new = {}, {}
      for i, (name, transform) in enumerate(transforms):
        gradient = jax.grad(
          lambda p, i=i, number=number: _losses(p, _batch(number))[i]
        )(ahead)[name]
        updates, new[name] = transform.update(
          gradient, states[name], params[name]
        )
        moved[name] = optax.apply_updates(params[name], updates)
      ahead = moved
    params, states = ahead, new
  return params


@jax.numpy_dtype_promotion("standard")
def _critic_loop():
  params = _values()["params"]
  d, g = (
    optax.adamw(_rate(0.1), weight_decay=0.0),
    optax.chain(
      optax.clip_by_global_norm(0.2), optax.sgd(_rate(0.3), momentum=0.9)
    ),
  )
  states = d.init(params["discriminator"]), g.init(params["generator"])
  for number in range(5):
    batch = _batch(number)
    for i in range(2):
      part = {k: x[i::2] for k, x in batch.items()}
      gradient = jax.grad(lambda p, part=part: _losses(p, part)[0])(params)
      updates, new = d.update(
        gradient["discriminator"], states[0], params["discriminator"]
      )
      states = new, states[1]
      params["discriminator"] = optax.apply_updates(
        params["discriminator"], updates
      )
    gradient = jax.grad(lambda p, batch=batch: _losses(p, batch)[1])(params)
    updates, new = g.update(
      gradient["generator"], states[1], params["generator"]
    )
    states = states[0], new
    params["generator"] = optax.apply_updates(params["generator"], updates)
  return params


@pytest.mark.parametrize("simultaneous", [False, True])
def test_variables_without_an_optimizer_follow_all_learners(simultaneous):
  overwrite = variables.UpdateRule.OVERWRITE_WITH_GRADIENT
  specs = SPECS | {
    "scales": {
      name: testing.spec(f"scales/{name}", (), update=overwrite)
      for name in ("d", "g")
    },
    "counts": {
      "n": testing.spec("counts/n", (), update=variables.UpdateRule.REPLACE)
    },
  }

  def loss_fn(values, batch, rngs):
    result = _loss_fn(values, batch, rngs)
    # The gradients of the scales are 8 * 3 / 8 and 8 * 5 / 8.
    metrics = {
      name: (result.metrics[name][0] + 8 * factor * scale, jnp.float32(8))
      for (name, scale), factor in zip(
        sorted(values["scales"].items()), (3.0, 5.0), strict=True
      )
    }
    new = {"counts": {"n": values["counts"]["n"] + 1}}
    return result._replace(metrics=metrics, new_collections=new)

  groups = _groups(program=learner_groups.InTurn(simultaneous=simultaneous))
  one = jnp.float32(1)
  values = {
    **_values(),
    "scales": {"d": one, "g": one},
    "counts": {"n": one},
  }
  state = train_state.make_initial(values, learner=groups, specs=specs)
  step = train_program.make_train_step(
    loss_fn, learner=groups, specs=specs, seed=0
  )
  new, _ = jax.jit(step)(state, _batch(0))
  scales = jax.tree.map(float, new.variables["scales"])
  assert scales == {"d": 3.0, "g": 5.0}
  assert float(new.variables["counts"]["n"]) == (2 if simultaneous else 3)


def test_random_keys_differ_by_learner_and_index():
  keys = []

  def loss_fn(values, batch, rngs):
    jax.debug.callback(
      lambda key: keys.append(np.asarray(key).tobytes()),
      jax.random.key_data(rngs["dropout"]),
    )
    return _loss_fn(values, batch, rngs)

  _train(_groups(program=_Critic()), steps=2, loss_fn=loss_fn)
  jax.effects_barrier()
  assert len(keys) == len(set(keys)) == 6


def test_resuming_is_bitwise():
  average = parameter_average.ParameterAverage(decay=0.5)
  groups = _groups(
    g_every=2,
    g_fields={"average": average, "skip": skipping.SkipUpdates()},
    d_fields={"count_tokens": True},
  )
  whole, _ = _train(groups, steps=6)
  half, _ = _train(groups, steps=3)
  resumed, _ = _train(groups, steps=6, state=half)
  for a, b in zip(
    jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  assert whole.skipped.keys() == {"generator"}
  assert int(whole.tokens["discriminator"][1]) == 6 * 8


def test_an_average_replaces_the_variables_of_its_learner_only():
  average = parameter_average.ParameterAverage(decay=0.5)
  groups = _groups(g_fields={"average": average})
  state, _ = _train(groups, steps=4)
  found = train_state.evaluation_variables(state, learner=groups, specs=SPECS)
  history = [np.asarray(_values()["params"]["generator"]["a"], np.float64)]
  for steps in range(1, 5):
    part, _ = _train(groups, steps=steps)
    history.append(np.asarray(part.variables["params"]["generator"]["a"]))
  expected, weight = 0.0, 0.0
  for value in history[1:]:
    expected, weight = 0.5 * expected + 0.5 * value, 0.5 * weight + 0.5
  np.testing.assert_allclose(
    found["params"]["generator"]["a"],
    average.values(state.average["generator"], _select(state, "generator"))[
      "params"
    ]["generator"]["a"],
  )
  if average.debias:
    np.testing.assert_allclose(
      found["params"]["generator"]["a"], expected / weight, rtol=1e-5
    )
  for name, value in state.variables["params"]["discriminator"].items():
    np.testing.assert_array_equal(found["params"]["discriminator"][name], value)


def _select(state, name):
  return {"params": {name: state.variables["params"][name]}}


def test_names_in_checkpoints_are_unique():
  average = parameter_average.ParameterAverage(decay=0.5)
  fields = {"average": average, "skip": skipping.SkipUpdates()}
  groups = _groups(g_fields=fields, d_fields=fields)
  specs = train_state.state_specs(SPECS, learner=groups)
  names = [spec.name for spec in jax.tree.leaves(specs)]
  assert len(names) == len(set(names))
  assert "average/params/generator/a" in names
  assert "average/discriminator/count" in names
  assert "skipped/generator" in names
  state = train_state.make_initial(_values(), learner=groups, specs=SPECS)
  assert jax.tree.structure(state) == jax.tree.structure(specs)
  for spec, leaf in zip(
    jax.tree.leaves(specs), jax.tree.leaves(state), strict=True
  ):
    assert (spec.shape, spec.dtype) == (leaf.shape, leaf.dtype)


def test_a_single_group_trains_as_its_learner_does():
  one = learner.Learner(optimizer=adamw.AdamW(schedule=_rate(0.1)))
  groups = learner_groups.LearnerGroups(
    groups=(learner_groups.LearnerGroup(name="all", pattern=".*", learner=one),)
  )
  a, first = _train(groups, steps=4)
  b, second = _train(one, steps=4)
  for x, y in zip(
    jax.tree.leaves(a.variables), jax.tree.leaves(b.variables), strict=True
  ):
    np.testing.assert_array_equal(x, y)
  np.testing.assert_allclose(
    [h["loss"][0] for h in first], [h["loss"][0] for h in second], rtol=1e-6
  )


class _Broken:
  """A program that returns a given result."""

  def __init__(self, result):
    self.result = result

  def run_step(self, updates, state, batch):
    """Returns the result."""
    state, metrics = updates["generator"](state, batch)
    return self.result(state, metrics)


def _narrow(state):
  return dataclasses.replace(
    state,
    variables=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.variables),
  )


@pytest.mark.parametrize(
  ("result", "error"),
  [
    (lambda s, m: (s.variables, {"generator": m}), "must return a state with"),
    (lambda s, m: (_narrow(s), {"generator": m}), "must not change shapes"),
    (lambda s, m: (s, m), "must return the metrics of a learner, by its name"),
  ],
  ids=["state", "dtype", "metrics"],
)
def test_rejects_wrong_results_of_a_program(result, error):
  with pytest.raises(
    (TypeError, ValueError), match=f"LearnerGroups.program: _Broken.*{error}"
  ):
    _train(_groups(program=_Broken(result)), steps=1)


def _group(name="a", pattern=".*", every_steps=1, **fields):
  made = learner.Learner(
    optimizer=optax_optimizer.OptaxOptimizer(
      make=optax.sgd, schedule=_rate(0.1)
    ),
    **fields,
  )
  return learner_groups.LearnerGroup(
    name=name, pattern=pattern, learner=made, every_steps=every_steps
  )


@pytest.mark.parametrize(
  ("patterns", "error"),
  [
    (
      (".*", "params/generator/.*"),
      "params/generator/a belongs to g0 and g1, but must belong to one",
    ),
    (
      ("params/discriminator/.*",),
      "params/generator/a has no group, but must belong to one",
    ),
    (
      (".*", "params/critic/.*"),
      "'params/critic/.*' of 'g1' matches no variable",
    ),
  ],
  ids=["overlap", "missing", "empty"],
)
def test_each_variable_belongs_to_one_group(patterns, error):
  groups = learner_groups.LearnerGroups(
    groups=[_group(f"g{i}", pattern) for i, pattern in enumerate(patterns)]
  )
  with pytest.raises(ValueError, match=error):
    train_state.state_specs(SPECS, learner=groups)


def test_an_unknown_loss_names_the_losses():
  with pytest.raises(ValueError, match=r"losses: 'x' is not .* loss, d, g"):
    _train(
      learner_groups.LearnerGroups(groups=[_group(losses={"x": 1.0})]), steps=1
    )


@pytest.mark.parametrize(
  ("make", "error"),
  [
    (lambda: _group(name="a b"), r"LearnerGroup.name .* got 'a b'"),
    (lambda: _group(pattern="("), "LearnerGroup.pattern"),
    (lambda: _group(every_steps=0), "LearnerGroup.every_steps"),
    (
      lambda: _group(
        privacy=privacy.Privacy(clip_norm=1.0, noise_multiplier=1.0)
      ),
      "LearnerGroup.learner must have no privacy",
    ),
    (
      lambda: _group(every_steps=2, offload_state=True),
      "must not offload_state",
    ),
    (
      lambda: learner_groups.LearnerGroups(groups=[_group(), _group()]),
      "LearnerGroups.groups must hold groups of different names, got a, a",
    ),
    (
      lambda: learner_groups.LearnerGroups(groups=[]),
      "LearnerGroups.groups must hold .* got none",
    ),
  ],
)
def test_rejects_wrong_fields(make, error):
  with pytest.raises(ValueError, match=error):
    make()


def test_rejects_a_program_without_a_step():
  groups = learner_groups.LearnerGroups(groups=[_group()])
  # The type checker of the tests rejects it before.
  object.__setattr__(groups, "program", 3)
  with pytest.raises(ValueError, match=r"program must have .* got int"):
    groups.__post_init__()
