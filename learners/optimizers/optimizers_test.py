"""One battery for all optimizers; a new optimizer is one row of `CASES`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import learner as learner_lib
from paxon.learners import optimizer_state, schedules, testing, train_state
from paxon.learners.optimizers import (
  adafactor,
  adam_8bit,
  adam_mini,
  adamw,
  cautious,
  kron,
  lion,
  muon,
  paper_rules,
  sgd,
  shampoo,
  soap,
  sophia,
)
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes

SCHEDULE = schedules.WarmupLinear(peak=0.1, warmup_steps=5, total_steps=30)
DECAY = 0.1
STACKED = (("layers", 1),)
SPECS = {
  "params": {
    # More layers than rows: `layers` must not be taken for a matrix's side.
    "kernel": testing.spec(
      "params/kernel",
      (12, 8, 4),
      axes=("layers", "embed", "mlp"),
      stacked=STACKED,
    ),
    "square": testing.spec("params/square", (8, 8), axes=("embed", "mlp")),
    "scale": testing.spec("params/scale", (8,), axes=("embed",)),
    "scales": testing.spec(
      "params/scales",
      (12, 8),
      axes=("layers", "embed"),
      stacked=STACKED,
      regularized=False,
    ),
    "offset": testing.spec("params/offset", ()),
  }
}


def _rate(t):
  """Of the update with number t, from 1."""
  return 0.1 * (t / 6 if t <= 6 else (31 - t) / 25)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WithSquares:
  """Passes squared gradients to Sophia as estimates of the Hessian."""

  optimizer: sophia.Sophia

  @property
  def schedule(self):
    return self.optimizer.schedule

  def transform(self, specs=None):
    inner = self.optimizer.transform(specs)

    def update(updates, state, params):
      return inner.update(
        updates,
        state,
        params,
        hessian=lambda: jax.tree.map(jnp.square, updates),
      )

    return optax.GradientTransformation(inner.init, update)


def _sophia(**fields):
  return _WithSquares(
    optimizer=sophia.Sophia(
      b1=0.9,
      b2=0.95,
      gamma=0.5,
      epsilon=1e-6,
      threshold=1.5,
      hessian_every=3,
      **fields,
    )
  )


def _kron(**fields):
  return kron.Kron(
    flat_steps=4, probability_decay=0.3, min_probability=0.4, **fields
  )


_KRON = _kron(schedule=SCHEDULE)


def _soap(**fields):
  return soap.Soap(
    b1=0.9,
    statistics_decay=0.9,
    epsilon=1e-6,
    refresh_every=3,
    max_dim=4,
    **fields,
  )


def _shampoo(**fields):
  given = {"block_size": 4, "start_step": 3, "roots_every": 1} | fields
  return shampoo.Shampoo(b2=0.95, matrix_epsilon=1e-3, **given)


def _adam_8bit(**fields):
  return adam_8bit.Adam8Bit(b2=0.95, epsilon=1e-6, min_size=16, **fields)


def _muon(**fields):
  return muon.Muon(
    momentum=0.9, epsilon=1e-6, iteration_dtype=jnp.float32, **fields
  )


def _adamw(**fields):
  return adamw.AdamW(b2=0.95, epsilon=1e-6, **fields)


def _cautious_lion(**fields):
  return cautious.Cautious(optimizer=lion.Lion(**fields))


def _adam_mini(**fields):
  return adam_mini.AdamMini(b2=0.95, epsilon=1e-6, **fields)


def _factored(**fields):
  return adafactor.Adafactor(min_dim_to_factor=4, **fields)


CASES = {
  "adamw": (_adamw, paper_rules.AdamW, {}, {}),
  "adamw, clipped": (
    _adamw,
    paper_rules.AdamW,
    {"max_update_rms": 0.5},
    {"max_rms": 0.5},
  ),
  "lion": (lion.Lion, paper_rules.Lion, {}, {}),
  "cautious lion": (_cautious_lion, paper_rules.CautiousLion, {}, {}),
  "adam-mini": (_adam_mini, paper_rules.AdamMini, {}, {}),
  "sgd": (sgd.Sgd, paper_rules.Sgd, {}, {}),
  "momentum": (sgd.Sgd, paper_rules.Sgd, {"momentum": 0.9}, {"momentum": 0.9}),
  "nesterov": (
    sgd.Sgd,
    paper_rules.Sgd,
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True},
  ),
  "muon": (_muon, paper_rules.Muon, {"update_rms": None}, {}),
  "muon, rms": (
    _muon,
    paper_rules.Muon,
    {"update_rms": 0.5, "nesterov": False},
    {"update_rms": 0.5, "nesterov": False},
  ),
  "adafactor": (_factored, paper_rules.Adafactor, {}, {}),
  "adafactor, momentum": (
    _factored,
    paper_rules.Adafactor,
    {"b1": 0.9},
    {"b1": 0.9},
  ),
  "adafactor, not factored": (
    adafactor.Adafactor,
    paper_rules.Adafactor,
    {},
    {"factored": False},
  ),
}
CASES |= {
  "kron": (_kron, paper_rules.Kron, {}, {"optimizer": _KRON, "max_dim": 100}),
  "kron, diagonal side": (
    _kron,
    paper_rules.Kron,
    {"max_dim": 4},
    {"optimizer": _KRON, "max_dim": 4},
  ),
  "soap": (_soap, paper_rules.Soap, {}, {}),
  "sophia": (_sophia, paper_rules.Sophia, {}, {}),
  "shampoo": (_shampoo, paper_rules.Shampoo, {}, {}),
  "shampoo, uneven blocks": (
    _shampoo,
    paper_rules.Shampoo,
    {
      "block_size": 3,
      "start_step": 0,
      "roots_every": 2,
      "average_momentum": True,
    },
    {"size": 3, "start": 0, "every": 2, "mean": True},
  ),
  "adam, 8 bits": (_adam_8bit, paper_rules.Adam8Bit, {}, {}),
}
ALL = pytest.mark.parametrize("case", CASES)


def _optimizer(case, schedule=SCHEDULE, weight_decay=DECAY):
  make, _, fields, _ = CASES[case]
  return make(schedule=schedule, weight_decay=weight_decay, **fields)


def _random(seed, specs=SPECS):
  random = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: jax.device_put(np.asarray(random.normal(size=s.shape), s.dtype)),
    specs,
  )


_applied = jax.jit(optax.apply_updates)


@functools.cache
def _transform(case):
  return _optimizer(case).transform(SPECS)


@functools.cache
def _update(case):
  return jax.jit(_transform(case).update)


@pytest.mark.nightly(keep=8)
@ALL
def test_twenty_steps_match_the_paper(case):
  transform = _transform(case)
  params = _random(0)
  state = optimizer_state.initial(transform, params)
  update = _update(case)
  _, oracle, _, fields = CASES[case]
  # One oracle for each layer of each variable.
  layers = {}
  for name, spec in SPECS["params"].items():
    value = np.asarray(params["params"][name], np.float64)
    for i in np.ndindex(spec.shape[: len(spec.stacked)]):
      layers[name, i] = [value[i], oracle(spec.layer_shape, **fields)]
  for t in range(1, 21):
    gradients = _random(t)
    updates, state = update(gradients, state, params)
    params = _applied(params, updates)
    for (name, i), layer in layers.items():
      value, rule = layer
      g = np.asarray(gradients["params"][name], np.float64)[i]
      decay = DECAY if SPECS["params"][name].regularized else 0.0
      layer[0] = value - _rate(t) * (
        rule.direction(value, g, t) + decay * value
      )
  params = jax.device_get(params)
  for (name, i), (value, _) in layers.items():
    np.testing.assert_allclose(
      params["params"][name][i], value, rtol=2e-5, atol=2e-6, err_msg=name
    )


@pytest.mark.nightly(keep=4)
@ALL
def test_reduces_a_quadratic(case):
  # A mean of directions is a tenth of their sum.
  rate = 0.2 if "uneven" in case else 0.02
  transform = _optimizer(
    case, schedules.Constant(value=rate), weight_decay=0.0
  ).transform(SPECS)
  params, target = _random(0), _random(1)

  def loss(params):
    return optax.tree.norm(optax.tree.sub(params, target), squared=True) / 2

  @jax.jit
  def step(params, state):
    updates, state = transform.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  state = optimizer_state.initial(transform, params)
  loss_of = jax.jit(loss)
  first = loss_of(params)
  for _ in range(300):
    params, state = step(params, state)
  assert float(loss_of(params)) < float(first) / 20


@ALL
def test_only_regularized_variables_decay(case):
  params = _random(0)
  zeros = jax.tree.map(jnp.zeros_like, params)
  state = optimizer_state.initial(_transform(case), params)
  updates, _ = _update(case)(zeros, state, params)
  for name, spec in SPECS["params"].items():
    share = _rate(1) * DECAY if spec.regularized else 0.0
    np.testing.assert_allclose(
      updates["params"][name], -share * params["params"][name], rtol=1e-6
    )


@ALL
def test_without_specs_all_variables_decay(case):
  transform = _optimizer(case, schedules.Constant(value=0.5)).transform()
  # One that does not with its spec is enough.
  params = {"params": {"scale": _random(0)["params"]["scale"]}}
  zeros = jax.tree.map(jnp.zeros_like, params)
  state = optimizer_state.initial(transform, params)
  updates, _ = jax.jit(transform.update)(zeros, state, params)
  np.testing.assert_allclose(
    updates["params"]["scale"], -0.05 * params["params"]["scale"], rtol=1e-6
  )


@ALL
def test_state_is_float32_for_bfloat16_parameters(case):
  specs = jax.tree.map(
    lambda s: dataclasses.replace(s, dtype=jnp.dtype(jnp.bfloat16)), SPECS
  )
  transform = _optimizer(case).transform(specs)
  state = optimizer_state.initial(transform, _random(0, specs))
  floats = {
    x.dtype
    for x in jax.tree.leaves(state)
    if jnp.issubdtype(x.dtype, jnp.floating)
  }
  assert floats <= {jnp.dtype(jnp.float32)}


@pytest.mark.nightly(keep=3)
@ALL
def test_specs_describe_the_state_and_layout_changes_no_value(case):
  learner = learner_lib.Learner(optimizer=_optimizer(case))
  transform = learner.transform(SPECS)
  specs = train_state.state_specs(SPECS, learner=learner)
  layout = layouts.Layout(
    meshes.make_mesh(meshes.MeshSpec.parse("fsdp=4,tensor=2"))
  )
  shardings = layout.shardings(specs)

  def run():
    params = _random(0)
    state = train_state.make_initial(params, learner=learner, specs=SPECS)
    updates, opt_state = transform.update(_random(1), state.opt_state, params)
    return updates, dataclasses.replace(state, opt_state=opt_state)

  updates, state = layout.jit(
    run, out_shardings=(shardings.variables, shardings)
  )()
  described = jax.tree.map(lambda s: (s.shape, s.dtype.name), specs)
  assert described == jax.tree.map(lambda x: (x.shape, x.dtype.name), state)
  names = [spec.name for spec in jax.tree.leaves(specs)]
  assert len(set(names)) == len(names)
  alone, alone_state = jax.jit(run)()
  # Roots of matrices without full rank depend on the order of sums.
  tolerance = 1e-4 if "shampoo" in case else 1e-7
  for ours, theirs in (
    (updates, alone),
    (state.opt_state, alone_state.opt_state),
  ):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=tolerance),
      ours,
      theirs,
    )
  # Whatever has the shape of its parameter is split as the parameter is.
  for spec, x in zip(
    jax.tree.leaves(specs.opt_state),
    jax.tree.leaves(state.opt_state),
    strict=True,
  ):
    owner = SPECS["params"].get(spec.name.rpartition("/")[2])
    if owner is not None and owner.shape == spec.shape:
      assert spec.axes == owner.axes
      assert spec.stacked == owner.stacked
      expected = layout.sharding(owner.axes)
      assert x.sharding.is_equivalent_to(expected, x.ndim)


@pytest.mark.parametrize(
  ("kind", "fields", "message"),
  [
    (lion.Lion, {"b1": 1.0}, r"Lion.b1 must be in \[0, 1\)"),
    (lion.Lion, {"b2": -0.1}, r"Lion.b2 must .*, got -0.1"),
    (lion.Lion, {"weight_decay": -1.0}, r"Lion.weight_decay must not be neg"),
    (sgd.Sgd, {"momentum": 1.0}, r"Sgd.momentum must .*, got 1.0"),
    (sgd.Sgd, {"weight_decay": -1.0}, r"Sgd.weight_decay must not be negative"),
    (sgd.Sgd, {"nesterov": True}, r"Sgd.nesterov needs Sgd.momentum"),
    *(
      (adafactor.Adafactor, {field: 0.0}, rf"{field} must be positive, got 0")
      for field in (
        "decay_exponent",
        "epsilon",
        "max_update_rms",
        "min_param_rms",
      )
    ),
    (
      adafactor.Adafactor,
      {"min_dim_to_factor": 0},
      r"min_dim_to_factor must be positive, got 0",
    ),
    (adafactor.Adafactor, {"b1": 1.0}, r"Adafactor.b1 must .*, got 1.0"),
    (adafactor.Adafactor, {"weight_decay": -1.0}, r"must not be negative"),
    (muon.Muon, {"momentum": 1.0}, r"Muon.momentum must .*, got 1.0"),
    (muon.Muon, {"iteration_dtype": jnp.int8}, r"must be a floating dtype"),
    (muon.Muon, {"num_iterations": 0}, r"num_iterations must be positive"),
    (muon.Muon, {"update_rms": 0.0}, r"Muon.update_rms must be positive"),
    (kron.Kron, {"factor_rate": 1.0}, r"Kron.factor_rate must .*, got 1.0"),
    (
      kron.Kron,
      {"min_probability": 0.0},
      r"min_probability must be in \(0, 1\]",
    ),
    (kron.Kron, {"flat_steps": -1}, r"flat_steps must not be negative"),
    (sophia.Sophia, {"hessian_every": 0}, r"hessian_every must be positive"),
    (sophia.Sophia, {"gamma": 0.0}, r"Sophia.gamma must be positive, got 0"),
    (soap.Soap, {"refresh_every": 0}, r"Soap.refresh_every must be positive"),
    (soap.Soap, {"statistics_decay": 1.0}, r"statistics_decay must .* got 1.0"),
    (shampoo.Shampoo, {"block_size": 0}, r"block_size must be positive, got 0"),
    (shampoo.Shampoo, {"b2": 1.5}, r"Shampoo.b2 must be in \[0, 1\], got 1.5"),
    (shampoo.Shampoo, {"start_step": -1}, r"start_step must not be negative"),
    (
      adam_8bit.Adam8Bit,
      {"min_size": 0},
      r"Adam8Bit.min_size must be positive",
    ),
    (adam_8bit.Adam8Bit, {"b1": 1.0}, r"Adam8Bit.b1 must .*, got 1.0"),
    (adamw.AdamW, {"max_update_rms": 0.0}, r"max_update_rms must be positive"),
  ],
)
def test_rejects(kind, fields, message):
  with pytest.raises(ValueError, match=message):
    kind(schedule=SCHEDULE, **fields)
