"""Tests for Adafactor; `optimizers_test` covers all optimizers."""

import jax
import numpy as np
import optax
import pytest

from paxon.learners import optimizer_state, schedules, testing
from paxon.learners.optimizers import adafactor

RATE = schedules.Constant(value=0.3)


def _specs(**shapes):
  axes = {1: ("embed",), 2: ("embed", "mlp"), 3: ("layers", "embed", "mlp")}
  return {
    "params": {
      name: testing.spec(
        f"params/{name}",
        shape,
        axes=axes[len(shape)],
        stacked=(("layers", 1),) if len(shape) == 3 else (),
      )
      for name, shape in shapes.items()
    }
  }


def _factored(specs):
  return adafactor.scale_by_factored_rms(
    decay_exponent=0.8, epsilon=1e-30, min_dim_to_factor=4, specs=specs
  )


def test_no_variables_have_empty_statistics():
  transform = _factored(None)
  state = transform.init({})
  assert (state.row, state.column, state.full) == ({}, {}, {})
  updates, state = transform.update({}, state)
  assert updates == {}
  assert int(state.count) == 1


def test_statistics_have_the_axes_of_their_parameter():
  specs = _specs(
    wide=(6, 9), tall=(9, 6), square=(6, 6), stack=(12, 6, 9), small=(3, 9)
  )
  state = optimizer_state.specs(_factored(specs), specs)

  def described(name):
    return [
      (leaf.shape, leaf.axes)
      for leaf in (
        tree["params"][name] for tree in (state.row, state.column, state.full)
      )
    ]

  one = ((1, 1), (None, None))
  row, column = ("embed", None), (None, "mlp")
  assert described("wide") == [((6, 1), row), ((1, 9), column), one]
  assert described("tall") == [((1, 6), column), ((9, 1), row), one]
  assert described("square") == [((6, 1), row), ((1, 6), column), one]
  assert described("small") == [one, one, ((3, 9), ("embed", "mlp"))]
  assert described("stack") == [
    ((12, 6, 1), ("layers", "embed", None)),
    ((12, 1, 9), ("layers", None, "mlp")),
    ((12, 1, 1), ("layers", None, None)),
  ]
  assert state.row["params"]["stack"].stacked == (("layers", 1),)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (6, 6), (5, 6, 7), (7,), ()])
def test_one_layer_agrees_with_optax(shape):
  ours = adafactor.Adafactor(
    schedule=RATE, min_dim_to_factor=4, b1=0.9
  ).transform()
  theirs = optax.adafactor(
    0.3, min_dim_size_to_factor=4, momentum=0.9, decay_rate=0.8
  )
  random = np.random.default_rng(0)
  params = [jax.device_put(np.float32(random.normal(size=shape)))] * 2
  states = [
    jax.jit(t.init)(p) for t, p in zip((ours, theirs), params, strict=True)
  ]

  def stepped(transform):
    def step(gradient, state, params):
      updates, state = transform.update(gradient, state, params)
      return optax.apply_updates(params, updates), state

    return jax.jit(step)

  steps = stepped(ours), stepped(theirs)
  with jax.numpy_dtype_promotion("standard"):
    for _ in range(10):
      gradient = jax.device_put(np.float32(random.normal(size=shape)))
      for i, step in enumerate(steps):
        params[i], states[i] = step(gradient, states[i], params[i])
  np.testing.assert_allclose(params[0], params[1], rtol=1e-5, atol=1e-6)


def test_stacked_layers_match_separate_layers():
  """The same numbers as each layer alone, though it is deeper than wide."""
  stacked = _specs(stack=(12, 6, 9))
  alone = _specs(stack=(6, 9))
  random = np.random.default_rng(0)
  value, gradient = (
    jax.device_put(np.float32(random.normal(size=(12, 6, 9)))) for _ in range(2)
  )

  def updated(specs):
    transform = adafactor.Adafactor(
      schedule=RATE, min_dim_to_factor=4
    ).transform(specs)

    def update(value, gradient):
      params = {"params": {"stack": value}}
      return transform.update(
        {"params": {"stack": gradient}}, transform.init(params), params
      )[0]["params"]["stack"]

    return jax.jit(update)

  whole = updated(stacked)(value, gradient)
  each = updated(alone)
  for i in range(12):
    np.testing.assert_allclose(whole[i], each(value[i], gradient[i]), rtol=1e-6)


@pytest.mark.parametrize(
  "shape", [(6, 6, 3, 3), (6, 6, 6, 6, 3), (3, 6, 6, 3), (6, 9, 6)]
)
def test_equal_dimensions_factor_the_last_two(shape):
  """On processors that sort ties in another order, too."""
  names = tuple("abcde"[: len(shape)])
  specs = {"params": {"w": testing.spec("params/w", shape, axes=names)}}
  second, largest = np.argsort(shape, kind="stable")[-2:].tolist()
  state = optimizer_state.specs(_factored(specs), specs)
  for tree, reduced in ((state.row, largest), (state.column, second)):
    assert tree["params"]["w"].axes == tuple(
      None if i == reduced else name for i, name in enumerate(names)
    )

  random = np.random.default_rng(0)
  transform = _factored(specs)
  values = transform.init({"params": {"w": np.zeros(shape, np.float32)}})
  row = column = np.float64(0)
  for step in range(1, 21):
    gradient = random.normal(size=shape)
    decay = 1 - step**-0.8
    square = gradient**2 + 1e-30
    row = decay * row + (1 - decay) * square.mean(largest, keepdims=True)
    column = decay * column + (1 - decay) * square.mean(second, keepdims=True)
    mean = row * column / row.mean(second, keepdims=True)
    updates, values = transform.update(
      {"params": {"w": jax.device_put(np.float32(gradient))}}, values
    )
    np.testing.assert_allclose(
      updates["params"]["w"], gradient / np.sqrt(mean), rtol=2e-5
    )
  np.testing.assert_allclose(values.row["params"]["w"], row, rtol=1e-5)


def test_state_size_is_one_row_and_one_column():
  specs = _specs(stack=(12, 60, 90))
  state = optimizer_state.specs(_factored(specs), specs)
  size = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state))
  assert size == 1 + 12 * (60 + 90 + 1)


def _praxis_reference(gradients, value, *, pair, rates, decay, b1, b2):
  """Praxis's variant in float64, from its definition, for one variable."""
  reduced = None if pair is None else (pair[1], pair[0])
  p = np.float64(value)
  row = column = full = momentum = np.float64(0)
  for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
    g = np.float64(gradient)
    keep = b2 * (1 - b2 ** (t - 1)) / (1 - b2**t)
    square = g**2 + 1e-30
    if reduced is None:
      full = keep * full + (1 - keep) * square
      u = g / np.sqrt(full)
    else:
      row = keep * row + (1 - keep) * square.mean(reduced[0], keepdims=True)
      column = keep * column + (1 - keep) * square.mean(
        reduced[1], keepdims=True
      )
      mean = row * column / row.mean(reduced[1], keepdims=True)
      u = g / np.sqrt(mean)
    u /= max(1.0, np.sqrt(np.mean(u**2)))
    momentum = b1 * momentum + (1 - b1) * rate * u
    p = p - momentum - rate * decay * p
  return p


@pytest.mark.parametrize(
  ("shape", "names", "pair", "b2"),
  [
    pytest.param((6, 9), ("embed", "mlp"), (0, 1), 0.99, id="matrix"),
    pytest.param((6, 9), ("embed", "mlp"), (0, 1), 0.0, id="b2=0"),
    pytest.param((7, 2), ("vocab", "embed"), (0, 1), 0.99, id="small"),
    pytest.param(
      (4, 3, 2), ("heads", "head_dim", "embed"), (0, 1), 0.99, id="out"
    ),
    pytest.param(
      (6, 3, 2, 4), ("embed", None, "heads", "head_dim"), (2, 3), 0.99, id="qkv"
    ),
    pytest.param(
      (6, 2, 3, 4),
      ("embed", "kv_heads", None, "head_dim"),
      (1, 3),
      0.99,
      id="gqa",
    ),
    pytest.param((5,), ("embed",), None, 0.99, id="vector"),
  ],
)
def test_the_variant_of_praxis_matches_its_definition(shape, names, pair, b2):
  spec = testing.spec("params/w", shape, axes=names, regularized=True)
  specs = {"params": {"w": spec}}
  schedule = schedules.WarmupExponential(
    peak=0.3, warmup_steps=2, total_steps=8, end=0.03
  )
  transform = adafactor.Adafactor(
    schedule=schedule,
    b1=0.9,
    b2=b2,
    factoring=adafactor.Factoring.LAST,
    momentum_after_rate=True,
    min_param_rms=None,
    weight_decay=0.01,
  ).transform(specs)
  random = np.random.default_rng(0)
  value = np.float32(random.normal(size=shape))
  gradients = np.float32(random.normal(size=(12, *shape)))
  params = {"params": {"w": jax.device_put(value)}}
  state = transform.init(params)

  @jax.jit
  def step(params, state, gradient):
    updates, state = transform.update(
      {"params": {"w": gradient}}, state, params
    )
    return optax.apply_updates(params, updates), state

  for gradient in gradients:
    params, state = step(params, state, jax.device_put(gradient))
  expected = _praxis_reference(
    gradients,
    value,
    pair=pair,
    rates=[float(schedule(t)) for t in range(12)],
    decay=0.01,
    b1=0.9,
    b2=b2,
  )
  np.testing.assert_allclose(
    params["params"]["w"], expected, rtol=2e-5, atol=1e-6
  )


def test_the_momentum_of_steps_keeps_earlier_rates():
  """With a rate of zero the parameters still move by earlier steps."""
  schedule = schedules.PiecewiseConstant(boundaries=(1,), values=(0.5, 0.0))
  moved = []
  for is_after in (False, True):
    transform = adafactor.Adafactor(
      schedule=schedule, b1=0.5, momentum_after_rate=is_after
    ).transform()
    params = jax.numpy.ones((3,))
    state = transform.init(params)
    _, state = transform.update(params, state, params)
    updates, _ = transform.update(params, state, params)
    moved.append(bool(jax.numpy.any(updates != 0)))
  assert moved == [False, True]


def test_momentum_after_rate_requires_momentum():
  with pytest.raises(ValueError, match="momentum_after_rate requires b1"):
    adafactor.Adafactor(schedule=RATE, momentum_after_rate=True)


def test_rejects_a_b2_of_one():
  with pytest.raises(ValueError, match=r"Adafactor.b2 must be"):
    adafactor.Adafactor(schedule=RATE, b2=1.0)


def _pax_oracle(p, gradients, rates, *, dtype, adapts, decay):
  """The update of Praxis for one matrix of one layer, in float64."""
  row = column = m = np.zeros(())
  if dtype == "int8":
    m = np.zeros(p.shape), np.zeros(p.shape[1:])
  for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
    keep = 0.99 * (1 - 0.99 ** (t - 1)) / (1 - 0.99**t)
    square = g**2 + 1e-30
    row = keep * row + (1 - keep) * square.mean(1)
    column = keep * column + (1 - keep) * square.mean(0)
    u = g / np.sqrt(np.outer(row, column) / row.mean())
    u = u / max(1, np.sqrt(np.mean(u**2)))
    old = m[0] * m[1] if dtype == "int8" else m
    step = 0.9 * old + 0.1 * rate * u
    if dtype == "int8":
      bucket = np.abs(step).max(0) / 127
      m = np.round(step / bucket), bucket
    else:
      m = np.asarray(step, jax.numpy.bfloat16).astype(np.float64)
    step = step + rate * decay * p
    if adapts:
      step *= np.sqrt(np.mean(p**2) / np.mean((step / rate) ** 2))
    p = p - step
  return p


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("adapts", [False, True])
def test_quantized_momentum_and_layerwise_adaptation_match_pax(dtype, adapts):
  specs = _specs(stack=(3, 4, 6), matrix=(4, 6))
  schedule = schedules.WarmupLinear(peak=0.1, warmup_steps=5, total_steps=30)
  transform = adafactor.Adafactor(
    schedule=schedule,
    b1=0.9,
    b2=0.99,
    factoring=adafactor.Factoring.LAST,
    momentum_after_rate=True,
    momentum_dtype=dtype,
    min_param_rms=None,
    layerwise_adaptation=adapts,
    not_adapted=".*matrix",
    weight_decay=0.1,
  ).transform(specs)
  random = np.random.default_rng(0)

  def draw():
    return jax.tree.map(
      lambda s: np.float32(random.normal(size=s.shape)), specs
    )

  first, gradients = draw(), [draw() for _ in range(12)]
  params = jax.tree.map(jax.device_put, first)
  state = optimizer_state.initial(transform, params)
  stored = {x.dtype.name for x in jax.tree.leaves(state[1].momentum)}
  assert stored == {dtype}

  @jax.jit
  def step(params, state, gradient):
    updates, state = transform.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  for gradient in gradients:
    params, state = step(params, state, jax.tree.map(jax.device_put, gradient))
  for name, i in (("stack", (0,)), ("stack", (2,)), ("matrix", ())):
    expected = _pax_oracle(
      np.float64(first["params"][name][i]),
      [np.float64(g["params"][name][i]) for g in gradients],
      [float(schedule(t)) for t in range(12)],
      dtype=dtype,
      adapts=adapts and name == "stack",
      decay=0.1,
    )
    # Values near the middle of two codes may round differently.
    np.testing.assert_allclose(
      params["params"][name][i], expected, rtol=1e-4, atol=5e-4
    )


def test_layerwise_adaptation_gives_updates_the_rms_of_parameters():
  transform = adafactor.Adafactor(
    schedule=RATE, layerwise_adaptation=True, min_param_rms=None, b1=0.9
  ).transform()
  params = {"w": jax.numpy.full((4, 6), 0.5)}
  gradient = {"w": jax.numpy.arange(24.0).reshape(4, 6)}
  updates, _ = transform.update(gradient, transform.init(params), params)
  np.testing.assert_allclose(
    np.sqrt(np.mean(np.square(updates["w"]))), 0.3 * 0.5, rtol=1e-5
  )


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"momentum_dtype": "int4", "b1": 0.9}, r"float32, bfloat16 or int8, got"),
    ({"momentum_dtype": "int8"}, r"momentum_dtype int8 requires b1, got None"),
    ({"layerwise_adaptation": True}, r"requires min_param_rms None.*0.001"),
    ({"not_adapted": "("}, r"not_adapted must be a regular expression"),
  ],
)
def test_rejects_fields(fields, message):
  with pytest.raises(ValueError, match=message):
    adafactor.Adafactor(schedule=RATE, **fields)
