"""One battery for all optimizers; a new optimizer is one row of `CASES`.

The oracles are written from the papers, in float64, for one array of one layer.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import (
  adafactor,
  adam_8bit,
  adam_mini,
  adamw,
  cautious,
  lion,
  muon,
  optimizer_state,
  schedules,
  sgd,
  shampoo,
  soap,
  testing,
  train_state,
)
from paxon.learners import learner as learner_lib
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


class _AdamW:
  """Loshchilov & Hutter 2019, algorithm 2."""

  def __init__(self, shape, max_rms=None):
    self.m, self.v, self.max_rms = np.zeros(shape), np.zeros(shape), max_rms

  def direction(self, p, g, t):
    self.m = 0.9 * self.m + 0.1 * g
    self.v = 0.95 * self.v + 0.05 * g**2
    u = (self.m / (1 - 0.9**t)) / (np.sqrt(self.v / (1 - 0.95**t)) + 1e-6)
    if self.max_rms is not None:
      u = u / max(1, np.sqrt(np.mean(u**2)) / self.max_rms)
    return u


class _AdamMini(_AdamW):
  """Zhang et al. 2024, algorithm 1: a block for each output, or one."""

  def direction(self, p, g, t):
    blocks = np.mean(g**2, axis=0 if g.ndim == 2 else None, keepdims=True)
    self.m = 0.9 * self.m + 0.1 * g
    self.v = 0.95 * self.v + 0.05 * blocks
    return (self.m / (1 - 0.9**t)) / (np.sqrt(self.v / (1 - 0.95**t)) + 1e-6)


class _Lion:
  """Chen et al. 2023, algorithm 2."""

  def __init__(self, shape):
    self.m = np.zeros(shape)

  def direction(self, p, g, t):
    u = np.sign(0.9 * self.m + (1 - 0.9) * g)
    self.m = 0.99 * self.m + (1 - 0.99) * g
    return u


class _CautiousLion(_Lion):
  """Liang et al. 2024, algorithm 1."""

  def direction(self, p, g, t):
    u = super().direction(p, g, t)
    c = u * g > 0
    return u * c * (g.size / (c.sum() + 1))


class _Sgd:
  """Sutskever et al. 2013, in the form of the docstring."""

  def __init__(self, shape, momentum=None, nesterov=False):
    self.m, self.momentum, self.nesterov = np.zeros(shape), momentum, nesterov

  def direction(self, p, g, t):
    if self.momentum is None:
      return g
    self.m = self.momentum * self.m + g
    return self.momentum * self.m + g if self.nesterov else self.m


class _Adafactor:
  """Shazeer & Stern 2018, algorithms 4 and 5, with a given step size."""

  def __init__(self, shape, b1=None, factored=True):
    self.b1, self.m, self.v = b1, np.zeros(shape), np.zeros(shape)
    self.factored = factored and len(shape) == 2
    if self.factored:
      self.rows, self.columns = np.zeros(shape[0]), np.zeros(shape[1])

  def direction(self, p, g, t):
    b2 = 1 - t**-0.8
    square = g**2 + 1e-30
    if self.factored:
      self.rows = b2 * self.rows + (1 - b2) * square.mean(1)
      self.columns = b2 * self.columns + (1 - b2) * square.mean(0)
      v = np.outer(self.rows, self.columns) / self.rows.mean()
    else:
      v = self.v = b2 * self.v + (1 - b2) * square
    u = g / np.sqrt(v)
    u = u / max(1, np.sqrt(np.mean(u**2)))
    u = u * max(1e-3, np.sqrt(np.mean(p**2)))
    if self.b1 is not None:
      u = self.m = self.b1 * self.m + (1 - self.b1) * u
    return u


class _Muon:
  """Jordan et al. 2024; update_rms as in Liu et al. 2025, equation 4."""

  def __init__(self, shape, nesterov=True, update_rms=None):
    self.adam, self.m = _AdamW(shape), np.zeros(shape)
    self.nesterov, self.update_rms = nesterov, update_rms

  def direction(self, p, g, t):
    if g.ndim < 2:
      return self.adam.direction(p, g, t)
    self.m = 0.9 * self.m + g
    x = 0.9 * self.m + g if self.nesterov else self.m
    x = x / np.sqrt(np.sum(x**2))
    for _ in range(5):
      a = x.T @ x
      x = 3.4445 * x + x @ (-4.7750 * a + 2.0315 * a @ a)
    rows, columns = g.shape
    if self.update_rms is not None:
      return self.update_rms * np.sqrt(max(rows, columns)) * x
    return np.sqrt(max(1, columns / rows)) * x


class _Soap:
  """Vyas et al. 2024, algorithm 3, with the first step of the authors' code."""

  def __init__(self, shape):
    self.t, self.m, self.v = -1, np.zeros(shape), np.zeros(shape)
    # Only sides of at most 4.
    self.used = [len(shape) == 2 and n <= 4 for n in shape]
    self.q = [np.eye(n) for n in shape]
    self.factors = [np.zeros((n, n)) for n in shape]

  def direction(self, p, g, t):
    self.t += 1
    u = np.zeros_like(g)
    if self.t:
      self.m = 0.9 * self.m + 0.1 * g
      self.v = 0.95 * self.v + 0.05 * self.rotate(g) ** 2
      u = self.rotate(self.m) / (1 - 0.9**self.t) * np.sqrt(1 - 0.95**self.t)
      u = self.rotate(u / (np.sqrt(self.v) + 1e-6), back=True)
    for i in (0, 1):
      if not any(self.used[i : i + 1]):
        continue
      outer = (g @ g.T, g.T @ g)[i]
      self.factors[i] = 0.9 * self.factors[i] + 0.1 * outer
      if self.t == 0:
        self.q[i] = np.linalg.eigh(self.factors[i])[1][:, ::-1]
      elif self.t % 3 == 0:
        values = np.diag(self.q[i].T @ self.factors[i] @ self.q[i])
        order = np.argsort(-values)
        self.v = np.take(self.v, order, axis=i)
        self.q[i] = np.linalg.qr(self.factors[i] @ self.q[i][:, order])[0]
    return u

  def rotate(self, x, back=False):
    if x.ndim != 2:
      return x
    left, right = (q.T if back else q for q in self.q)
    return left.T @ x @ right


class _Shampoo:
  """Anil et al. 2020, with Pax's momenta and AdaGrad's norm."""

  def __init__(self, shape, size=4, start=3, every=1, mean=False):
    self.size, self.start, self.every, self.mean = size, start, every, mean
    self.sums, self.m, self.n = (np.zeros(shape) for _ in range(3))
    self.blocks = {}

  def direction(self, p, g, t):
    self.sums = self.sums + g**2
    a = g / (np.sqrt(self.sums) + 1e-16)
    u = self.precondition(g, t) if g.ndim else a
    u = u * (np.linalg.norm(a) / (np.linalg.norm(u) + 1e-16))
    share = 0.1 if self.mean else 1.0
    self.m = 0.9 * self.m + share * u
    self.n = 0.9 * self.n + share * a
    if t - 1 >= self.start:
      return 0.9 * self.m + share * u
    return 0.9 * self.n + share * a

  def precondition(self, g, t):
    u = np.zeros_like(g)
    starts = [range(0, n, self.size) for n in g.shape]
    for corner in itertools.product(*starts):
      at = tuple(slice(i, i + self.size) for i in corner)
      x = g[at]
      if corner not in self.blocks:
        eyes = [np.eye(n) for n in x.shape]
        self.blocks[corner] = [[1e-3 * eye for eye in eyes], eyes]
      factors, roots = self.blocks[corner]
      outers = [x @ x.T, x.T @ x] if x.ndim == 2 else [np.outer(x, x)]
      for i, outer in enumerate(outers):
        factors[i] = 0.95 * factors[i] + 0.05 * outer
        if (t - 1) % self.every == 0:
          values, vectors = np.linalg.eigh(factors[i])
          values = values + 1e-3 * values.max()
          roots[i] = (vectors * values ** (-0.5 / x.ndim)) @ vectors.T
      u[at] = roots[0] @ x @ roots[1] if x.ndim == 2 else roots[0] @ x
    return u


class _Adam8Bit(_AdamW):
  """Dettmers et al. 2022, section 2: each moment is stored rounded."""

  def direction(self, p, g, t):
    u = super().direction(p, g, t)
    if g.size >= 16:
      self.m, self.v = self.store(self.m, True), self.store(self.v, False)
    return u

  def store(self, x, signed):
    values = adam_8bit.make_table(signed).astype(np.float64)
    scale = np.abs(x).max()
    nearest = np.abs(x[..., None] / scale - values).argmin(-1)
    return values[nearest] * scale


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
  return muon.Muon(momentum=0.9, epsilon=1e-6, **fields)


def _adamw(**fields):
  return adamw.AdamW(b2=0.95, epsilon=1e-6, **fields)


def _cautious_lion(**fields):
  return cautious.Cautious(optimizer=lion.Lion(**fields))


def _adam_mini(**fields):
  return adam_mini.AdamMini(b2=0.95, epsilon=1e-6, **fields)


def _factored(**fields):
  return adafactor.Adafactor(min_dim_to_factor=4, **fields)


CASES = {
  "adamw": (_adamw, _AdamW, {}, {}),
  "adamw, clipped": (
    _adamw,
    _AdamW,
    {"max_update_rms": 0.5},
    {"max_rms": 0.5},
  ),
  "lion": (lion.Lion, _Lion, {}, {}),
  "cautious lion": (_cautious_lion, _CautiousLion, {}, {}),
  "adam-mini": (_adam_mini, _AdamMini, {}, {}),
  "sgd": (sgd.Sgd, _Sgd, {}, {}),
  "momentum": (sgd.Sgd, _Sgd, {"momentum": 0.9}, {"momentum": 0.9}),
  "nesterov": (
    sgd.Sgd,
    _Sgd,
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True},
  ),
  "muon": (_muon, _Muon, {"update_rms": None}, {}),
  "muon, rms": (
    _muon,
    _Muon,
    {"update_rms": 0.5, "nesterov": False},
    {"update_rms": 0.5, "nesterov": False},
  ),
  "adafactor": (_factored, _Adafactor, {}, {}),
  "adafactor, momentum": (_factored, _Adafactor, {"b1": 0.9}, {"b1": 0.9}),
  "adafactor, not factored": (
    adafactor.Adafactor,
    _Adafactor,
    {},
    {"factored": False},
  ),
}
CASES |= {
  "soap": (_soap, _Soap, {}, {}),
  "shampoo": (_shampoo, _Shampoo, {}, {}),
  "shampoo, uneven blocks": (
    _shampoo,
    _Shampoo,
    {
      "block_size": 3,
      "start_step": 0,
      "roots_every": 2,
      "average_momentum": True,
    },
    {"size": 3, "start": 0, "every": 2, "mean": True},
  ),
  "adam, 8 bits": (_adam_8bit, _Adam8Bit, {}, {}),
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
    (muon.Muon, {"num_iterations": 0}, r"num_iterations must be positive"),
    (muon.Muon, {"update_rms": 0.0}, r"Muon.update_rms must be positive"),
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
