"""Tests for several optimizers chosen by path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import learner as learner_lib
from paxon.learners import schedules, testing, train_state, train_step
from paxon.learners.optimizers import (
  adafactor,
  adamw,
  lion,
  optimizer_by_path,
  sgd,
)
from paxon.sharding import variables

OVERWRITE = variables.UpdateRule.OVERWRITE_WITH_GRADIENT
SPECS = {
  "params": {
    "embedding": {"table": testing.spec("params/embedding/table", (8, 4))},
    "block": {
      "kernel": testing.spec("params/block/kernel", (4, 4)),
      "scale": testing.spec("params/block/scale", (4,)),
    },
  },
  "fp8": {"scale": testing.spec("fp8/scale", (), update=OVERWRITE)},
}
PARAMS = {"params": SPECS["params"]}


def _rate(value):
  return schedules.Constant(value=value)


def _rule(name, pattern, optimizer=None):
  return optimizer_by_path.PathRule(
    name=name,
    pattern=pattern,
    optimizer=optimizer or sgd.Sgd(schedule=_rate(1.0)),
  )


OPTIMIZERS = {
  "factored": adafactor.Adafactor(schedule=_rate(0.1), weight_decay=0.1),
  "vectors": lion.Lion(schedule=_rate(0.2)),
  "rest": adamw.AdamW(schedule=_rate(0.3), weight_decay=0.1),
}
BY_PATH = optimizer_by_path.OptimizerByPath(
  rules=(
    _rule("factored", r"params/embedding/.*", OPTIMIZERS["factored"]),
    _rule("vectors", r".*/scale", OPTIMIZERS["vectors"]),
    # Matches all, but the first rule that matches wins.
    _rule("rest", r".*", OPTIMIZERS["rest"]),
  )
)
OWNERS = {
  ("embedding", "table"): "factored",
  ("block", "scale"): "vectors",
  ("block", "kernel"): "rest",
}


def _random(seed):
  random = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: jax.device_put(np.float32(random.normal(size=s.shape))), PARAMS
  )


def test_each_variable_matches_its_optimizer_alone():
  transform = BY_PATH.transform(PARAMS)
  params, gradients = _random(0), _random(1)
  updates, _ = jax.jit(transform.update)(
    gradients, transform.init(params), params
  )
  assert jax.tree.structure(updates) == jax.tree.structure(params)
  for (module, name), owner in OWNERS.items():

    def only(tree, module=module, name=name):
      return {"params": {module: {name: tree["params"][module][name]}}}

    alone = OPTIMIZERS[owner].transform(only(PARAMS))
    expected, _ = jax.jit(
      lambda g, p, alone=alone: alone.update(g, alone.init(p), p)
    )(only(gradients), only(params))
    np.testing.assert_allclose(
      updates["params"][module][name],
      expected["params"][module][name],
      rtol=1e-6,
    )


def test_a_rule_clips_the_norm_of_its_own_variables():
  plain = sgd.Sgd(schedule=_rate(1.0))
  rules = (
    optimizer_by_path.PathRule(
      name="table", pattern=".*table", optimizer=plain, max_grad_norm=0.5
    ),
    optimizer_by_path.PathRule(
      name="block", pattern=".*", optimizer=plain, max_grad_norm=2.0
    ),
  )
  transform = optimizer_by_path.OptimizerByPath(rules=rules).transform(PARAMS)
  params, gradients = _random(0), _random(1)
  updates, _ = transform.update(gradients, transform.init(params), params)
  g, u = gradients["params"], updates["params"]
  for name, largest in (("embedding", 0.5), ("block", 2.0)):
    leaves = [np.float64(x) for x in jax.tree.leaves(g[name])]
    norm = np.sqrt(sum(np.sum(x**2) for x in leaves))
    assert norm > largest
    for x, y in zip(leaves, jax.tree.leaves(u[name]), strict=True):
      np.testing.assert_allclose(y, -x * largest / norm, rtol=1e-5)


def test_state_names_contain_the_optimizer():
  learner = learner_lib.Learner(optimizer=BY_PATH)
  specs = train_state.state_specs(SPECS, learner=learner)
  names = [spec.name for spec in jax.tree.leaves(specs.opt_state)]
  assert "opt_state/rest/0/mu/params/block/kernel" in names
  assert "opt_state/vectors/0/mu/params/block/scale" in names
  assert "opt_state/factored/0/row/params/embedding/table" in names
  assert len(set(names)) == len(names)
  # Overwritten variables have no state in any optimizer.
  assert not any("fp8" in name for name in names)
  values = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), SPECS)
  state = train_state.make_initial(values, learner=learner, specs=SPECS)
  assert jax.tree.structure(state) == jax.tree.structure(specs)


def test_learning_rates_of_all_optimizers():
  learner = learner_lib.Learner(optimizer=BY_PATH)
  rates = {k: float(v) for k, v in learner.learning_rates(0).items()}
  assert rates == pytest.approx(
    {
      "learning_rate": 0.1,
      "learning_rate/factored": 0.1,
      "learning_rate/vectors": 0.2,
      "learning_rate/rest": 0.3,
    }
  )


@pytest.mark.parametrize(
  ("rules", "message"),
  [
    (
      [_rule("a", r"params/block/.*")],
      r"No pattern .* matches params/embedding/table \(patterns: 'params/blo",
    ),
    (
      [_rule("a", r".*"), _rule("b", r"params/block/.*")],
      r"The rule 'b' of OptimizerByPath has no variable: its pattern 'params",
    ),
    (
      [_rule("a", r"block"), _rule("b", r".*")],
      r"The rule 'a' .* whole logical name must match",
    ),
  ],
)
def test_rejects_rules_that_do_not_fit_the_variables(rules, message):
  optimizer = optimizer_by_path.OptimizerByPath(rules=rules)
  with pytest.raises(ValueError, match=message):
    optimizer.transform(PARAMS)


def test_needs_specs():
  with pytest.raises(ValueError, match="needs the specs of the variables"):
    BY_PATH.transform()


def test_rejects_bad_rules():
  with pytest.raises(ValueError, match="must hold at least one rule"):
    optimizer_by_path.OptimizerByPath(rules=())
  with pytest.raises(ValueError, match="different names, got 'a' 2 times"):
    optimizer_by_path.OptimizerByPath(rules=(_rule("a", "x"), _rule("a", "y")))
  with pytest.raises(ValueError, match=r"regular expression, got '\('"):
    _rule("a", "(")
  with pytest.raises(ValueError, match="letters, digits and underscores, got"):
    _rule("a/b", ".*")
  with pytest.raises(ValueError, match=r"max_grad_norm must be .*got 0"):
    optimizer_by_path.PathRule(
      name="a", pattern="x", optimizer=OPTIMIZERS["rest"], max_grad_norm=0.0
    )


def test_overwritten_variables_bypass_optimizer_and_clipping():
  """In Pax's learner of several optimizers fp8 scales went through Adam."""

  @jax.custom_vjp
  def scaled(x, scale):
    del scale
    return x

  scaled.defvjp(lambda x, scale: (x, None), lambda _, g: (g, jnp.float32(50)))

  def loss(values, batch, rngs):
    del rngs
    params = values["params"]
    x = scaled(batch["x"], values["fp8"]["scale"])
    y = x @ params["embedding"]["table"] @ params["block"]["kernel"]
    total = jnp.sum((y * params["block"]["scale"][None]) ** 2)
    return train_step.LossOutput(
      loss=(total, jnp.float32(1)),
      metrics={},
      outputs={},
      new_collections={},
    )

  def run(scale, num_microbatches):
    learner = learner_lib.Learner(
      optimizer=BY_PATH,
      max_grad_norm=0.1,
      max_variable_grad_norm=0.1,
      num_microbatches=num_microbatches,
    )
    values = _random(0) | {"fp8": {"scale": jnp.float32(scale)}}
    state = train_state.make_initial(values, learner=learner, specs=SPECS)
    step = train_step.make_train_step(
      loss, learner=learner, specs=SPECS, seed=0
    )
    return jax.jit(step)(state, {"x": jnp.ones((2, 8))})

  for num_microbatches in (1, 2):
    state, metrics = run(1.0, num_microbatches)
    # Exactly the gradient: neither scaled, nor a rate times a direction.
    assert float(state.variables["fp8"]["scale"]) == 50.0
    other, other_metrics = run(1e6, num_microbatches)
    assert metrics["grad_norm"] == other_metrics["grad_norm"]
    jax.tree.map(
      np.testing.assert_array_equal,
      (state.variables["params"], state.opt_state),
      (other.variables["params"], other.opt_state),
    )
