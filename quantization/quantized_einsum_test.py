"""Tests for quantized matmuls and their derivatives."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import (
  number_formats,
  quantized_einsum,
  recipe,
  testing,
)

SIZES = dict(zip("BTSDFEKGH", (2, 4, 4, 8, 4, 2, 2, 2, 4), strict=True))
E4M3, E5M2 = number_formats.FP8_E4M3, number_formats.FP8_E5M2
INT8, INT4 = number_formats.INT8, number_formats.INT4
FORMATS = {"fp8": (E4M3, E5M2), "int8": (INT8, INT8), "int4": (INT4, INT8)}
GRANULARITIES = {
  "tensor": {},
  "channel": {"granularity": recipe.Granularity.CHANNEL},
  "rows": {"granularity": recipe.Granularity.BLOCK, "block": (4, 1)},
  "squares": {"granularity": recipe.Granularity.BLOCK, "block": (4, 2)},
}
STOCHASTIC = recipe.Rounding.STOCHASTIC


def _recipe(formats: str, **kwargs) -> recipe.Recipe:
  forward, backward = (
    recipe.TensorRecipe(f, **kwargs) for f in FORMATS[formats]
  )
  return recipe.Recipe(forward, forward, backward)


FP8, INT8_ROWS = _recipe("fp8"), _recipe("int8", **GRANULARITIES["channel"])
RECIPES = {
  f"{formats}-{granularity}": _recipe(formats, **GRANULARITIES[granularity])
  for formats in FORMATS
  for granularity in GRANULARITIES
}
RECIPES |= {
  "kernel only": dataclasses.replace(INT8_ROWS, lhs=None, gradient=None),
  "activations only": dataclasses.replace(FP8, rhs=None),
  "forward only": dataclasses.replace(INT8_ROWS, gradient=None),
  "gradient only": recipe.Recipe(None, None, FP8.gradient),
  "int8 and fp8": dataclasses.replace(FP8, gradient=INT8_ROWS.gradient),
  "wider backward": dataclasses.replace(
    _recipe("int4"), backward_lhs=INT8_ROWS.lhs, backward_rhs=FP8.rhs
  ),
}


@functools.partial(jax.jit, static_argnames=("equation", "tensors", "wide"))
def _matmuls(equation, lhs, rhs, gradient, state, *, tensors, wide=None):
  """Returns the output, and the gradients of lhs, rhs and state."""

  def product(lhs, rhs, state):
    return quantized_einsum.quantized_einsum(
      equation,
      lhs,
      rhs,
      recipe=tensors,
      state=state,
      preferred_element_type=wide,
    )

  out, backward = jax.vjp(product, lhs, rhs, state)
  return out, *backward(gradient)


def _operands(equation: str, seed: int = 0) -> list[np.ndarray]:
  """Returns random operands, and a gradient of the output."""
  rng = np.random.default_rng(seed)
  shapes = [[SIZES[c] for c in t] for t in re.findall(r"\w+", equation)]
  return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def _oracle(equation, operands, tensors, scales=None):
  """The definition: the output, and the gradients of lhs and rhs."""
  left, right, out = re.findall(r"\w+", equation)
  lhs, rhs, gradient = operands
  scales = scales or {}

  def product(*parts):
    (x, of_x, x_name, a), (y, of_y, y_name, b), c = parts
    values = []
    for value, tensor, name, term in (
      (x, of_x, x_name, a),
      (y, of_y, y_name, b),
    ):
      contracted = tuple(i for i, k in enumerate(term) if k not in c)
      values.append(
        testing.quantize(value, tensor, contracted, scale=scales.get(name))
      )
    return np.einsum(f"{a},{b}->{c}", *values)

  whole = product(
    (lhs, tensors.lhs, "lhs", left), (rhs, tensors.rhs, "rhs", right), out
  )
  if tensors.gradient is None:
    contracted = [
      tuple(i for i, k in enumerate(t) if k not in out) for t in (left, right)
    ]
    narrow_lhs = testing.quantize(lhs, tensors.lhs, contracted[0])
    narrow_rhs = testing.quantize(rhs, tensors.rhs, contracted[1])
    return (
      whole,
      np.einsum(f"{out},{right}->{left}", gradient, narrow_rhs),
      np.einsum(f"{left},{out}->{right}", narrow_lhs, gradient),
    )
  of_gradient = (gradient, tensors.gradient, "gradient", out)
  again_lhs = (lhs, tensors.backward_lhs or tensors.lhs, "lhs", left)
  again_rhs = (rhs, tensors.backward_rhs or tensors.rhs, "rhs", right)
  return (
    whole,
    product(of_gradient, again_rhs, left),
    product(again_lhs, of_gradient, right),
  )


def _assert_close(got, expected, relative=2e-6):
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_allclose(
      np.asarray(x, np.float64), y, atol=relative * np.abs(y).max()
    )


@pytest.mark.parametrize("name", RECIPES)
def test_matmuls_match_numpy_on_quantized_operands(name):
  equation = "BTD,DF->BTF"
  operands = _operands(equation)
  got = _matmuls(equation, *operands, None, tensors=RECIPES[name])
  _assert_close(got[:3], _oracle(equation, operands, RECIPES[name]))


@pytest.mark.parametrize(
  ("equation", "name"),
  [
    ("BTED,EDF->BTEF", "fp8-tensor"),
    ("BTED,EDF->BTEF", "int8-channel"),
    ("BTED,EDF->BTEF", "int4-squares"),
    ("BTKGH,BSKH->BKGTS", "fp8-tensor"),
    ("BTKGH,BSKH->BKGTS", "int8-channel"),
    ("BTKH,KHD->BTD", "fp8-channel"),
    ("BTD,DKGH->BTKGH", "int4-channel"),
    ("BTD,FD->BTF", "fp8-rows"),
  ],
)
def test_matmuls_of_other_layers_match_numpy(equation, name):
  operands = _operands(equation)
  got = _matmuls(equation, *operands, None, tensors=RECIPES[name])
  _assert_close(got[:3], _oracle(equation, operands, RECIPES[name]))


@pytest.mark.parametrize("name", ["fp8-tensor", "int8-channel", "fp8-rows"])
@pytest.mark.parametrize("wide", [None, jnp.dtype("float32")])
def test_a_bfloat16_layer_gets_bfloat16_gradients(name, wide):
  equation = "BTD,DF->BTF"
  narrow = [
    jax.device_put(np.asarray(x, jnp.bfloat16)) for x in _operands(equation)
  ]
  operands = [np.asarray(x, np.float32) for x in narrow]
  gradient = narrow[2].astype(wide or jnp.bfloat16)
  got = _matmuls(
    equation, *narrow[:2], gradient, None, tensors=RECIPES[name], wide=wide
  )
  assert [x.dtype for x in got[:3]] == [wide or "bfloat16", *["bfloat16"] * 2]
  # Half a unit of the result; tiles also round what is multiplied.
  tolerance = 2.0**-7 if name == "fp8-rows" else 2.0**-8
  _assert_close(got[:3], _oracle(equation, operands, RECIPES[name]), tolerance)


DELAYED = {
  "plain": {"history_length": 1},
  "window": {"history_length": 4, "margin": 1, "initial_scale": 0.125},
  "exact": {"history_length": 16, "power_of_two": False},
}


@pytest.mark.parametrize("formats", ["fp8", "int8"])
@pytest.mark.parametrize("scaling", DELAYED)
def test_delayed_scaling_matches_a_simulation_over_50_steps(scaling, formats):
  tensors = _recipe(formats, scaling=recipe.Delayed(**DELAYED[scaling]))
  names = ("lhs", "rhs", "gradient")
  simulated = {name: testing.Delayed(getattr(tensors, name)) for name in names}
  state = quantized_einsum.initial_state(tensors)
  equation = "BTD,DF->BTF"
  rng = np.random.default_rng(0)
  for step in range(50):
    # Grows, shrinks, and jumps, so that values saturate at times.
    drift = np.exp2(rng.integers(-6, 6, 3)).astype(np.float32)
    operands = [
      x * s for x, s in zip(_operands(equation, step), drift, strict=True)
    ]
    scales = {name: simulated[name].scale for name in names}
    *got, state = _matmuls(equation, *operands, state, tensors=tensors)
    _assert_close(got, _oracle(equation, operands, tensors, scales))
    for name, x in zip(names, operands, strict=True):
      simulated[name].end_step(x)
      np.testing.assert_array_equal(
        state[quantized_einsum.history_name(name)], simulated[name].history
      )


def test_microbatches_are_combined_by_the_elementwise_maximum():
  tensors = _recipe("fp8", scaling=recipe.Delayed(history_length=3))
  equation = "BTD,DF->BTF"
  lhs, rhs, gradient = _operands(equation)
  state = {
    name: jax.device_put(np.float32([2.0, 5.0, 1.0]))
    for name in quantized_einsum.initial_state(tensors)
  }
  run = functools.partial(_matmuls, equation, tensors=tensors)
  whole = run(lhs, rhs, gradient, state)
  parts = [run(lhs[i : i + 1], rhs, gradient[i : i + 1], state) for i in (0, 1)]
  combined = jax.tree.map(jnp.maximum, parts[0][3], parts[1][3])
  jax.tree.map(np.testing.assert_array_equal, combined, whole[3])
  # All of them have the scales of the old state.
  np.testing.assert_array_equal(
    jnp.concatenate([parts[0][0], parts[1][0]]), whole[0]
  )


def test_an_unused_state_has_a_zero_gradient():
  tensors = _recipe("fp8", scaling=recipe.Delayed(history_length=3))
  equation = "BTD,DF->BTF"
  lhs, rhs, gradient = map(jnp.asarray, _operands(equation))
  state = {
    name: jax.device_put(np.float32([2.0, 5.0, 1.0]))
    for name in quantized_einsum.initial_state(tensors)
  }
  zeros = _matmuls(equation, lhs, rhs, 0 * gradient, state, tensors=tensors)[3]
  assert all((np.asarray(x) == 0).all() for x in zeros.values())
  reached = _matmuls(equation, lhs, rhs, gradient, state, tensors=tensors)[3]
  assert all((np.asarray(x) != 0).all() for x in reached.values())


def test_the_state_has_a_history_for_each_delayed_operand():
  delayed = recipe.TensorRecipe(E4M3, scaling=recipe.Delayed())
  state = quantized_einsum.initial_state(
    recipe.Recipe(delayed, FP8.rhs, delayed)
  )
  assert {name: x.shape for name, x in state.items()} == {
    "lhs_amax_history": (1024,),
    "gradient_amax_history": (1024,),
  }
  assert quantized_einsum.initial_state(FP8) is None


def test_without_a_state_delayed_scales_are_current_ones():
  equation = "BTD,DF->BTF"
  operands = _operands(equation)
  tensors = _recipe("fp8", scaling=recipe.Delayed())
  got = _matmuls(equation, *operands, None, tensors=tensors)
  expected = _matmuls(equation, *operands, None, tensors=FP8)
  for x, y in zip(got[:3], expected[:3], strict=True):
    np.testing.assert_array_equal(x, y)


def test_rejects_another_state():
  with pytest.raises(ValueError, match=r"must have the arrays \{\} of .*got"):
    quantized_einsum.quantized_einsum(
      "AB,BC->AC",
      jnp.ones((2, 2)),
      jnp.ones((2, 2)),
      recipe=FP8,
      state={"lhs_amax_history": jnp.zeros(3)},
    )


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize(
  "name", ["fp8-tensor", "int8-channel", "int4-squares", "fp8", "int8"]
)
def test_non_finite_values_stay_visible(name, bad):
  """In all that it reaches without quantization; without a dash: delayed."""
  equation = "BTD,DF->BTF"
  delayed = {"scaling": recipe.Delayed(history_length=2)}
  tensors = RECIPES.get(name) or _recipe(name, **delayed)
  state = quantized_einsum.initial_state(tensors)
  for operand in range(3):
    operands = _operands(equation)
    operands[operand].ravel()[0] = bad
    got = _matmuls(equation, *operands, state, tensors=tensors)
    with np.errstate(invalid="ignore"):
      left, right, out = re.findall(r"\w+", equation)
      plain = (
        np.einsum(equation, *operands[:2]),
        np.einsum(f"{out},{right}->{left}", operands[2], operands[1]),
        np.einsum(f"{left},{out}->{right}", operands[0], operands[2]),
      )
    for x, y in zip(got[:3], plain, strict=True):
      assert not np.isfinite(x)[~np.isfinite(y)].any()
    if state is not None:
      assert all(np.isfinite(x).all() for x in got[3].values())


def test_zeros_give_zeros():
  equation = "BTD,DF->BTF"
  lhs, rhs, gradient = _operands(equation)
  for name in ("fp8-tensor", "int8-channel", "fp8-squares"):
    out, to_lhs, to_rhs, _ = _matmuls(
      equation, 0 * lhs, rhs, gradient, None, tensors=RECIPES[name]
    )
    assert not np.asarray(out).any()
    assert not np.asarray(to_rhs).any()
    assert np.asarray(to_lhs).any()


def test_the_mean_of_stochastic_gradients_is_that_of_the_exact_one():
  equation, draws = "BTD,DF->BTF", 2000
  tensors = dataclasses.replace(
    FP8,
    gradient=recipe.TensorRecipe(
      INT4, granularity=recipe.Granularity.CHANNEL, rounding=STOCHASTIC
    ),
  )
  operands = _operands(equation)
  lhs, rhs, gradient = map(jnp.asarray, operands)

  def gradients(key):
    _, backward = jax.vjp(
      lambda lhs, rhs: quantized_einsum.quantized_einsum(
        equation, lhs, rhs, recipe=tensors, key=key
      ),
      lhs,
      rhs,
    )
    return backward(gradient)

  keys = jax.random.split(jax.random.key(0), draws)
  exact = dataclasses.replace(tensors, gradient=None)
  for drawn, expected in zip(
    jax.jit(jax.vmap(gradients))(keys),
    _oracle(equation, operands, exact)[1:],
    strict=True,
  ):
    deviation = np.std(drawn, 0)
    assert (deviation > 0.01).all()
    off = np.abs(np.mean(drawn, 0) - expected)
    np.testing.assert_array_less(off, 5 * deviation / np.sqrt(draws))


def test_forward_without_a_key_rounds_to_nearest():
  equation = "BTD,DF->BTF"
  lhs, rhs, _ = _operands(equation)
  compiled = jax.jit(
    quantized_einsum.quantized_einsum,
    static_argnums=0,
    static_argnames="recipe",
  )
  product = functools.partial(compiled, equation, lhs, rhs)
  drawn = _recipe("int8", rounding=STOCHASTIC)
  nearest = product(recipe=_recipe("int8"))
  np.testing.assert_array_equal(product(recipe=drawn), nearest)
  assert (product(recipe=drawn, key=jax.random.key(0)) != nearest).any()


def test_rejects_stochastic_backward_without_a_key():
  tensors = dataclasses.replace(
    FP8, gradient=recipe.TensorRecipe(E5M2, rounding=STOCHASTIC)
  )
  with pytest.raises(ValueError, match=r"STOCHASTIC needs a random key"):
    jax.eval_shape(
      jax.grad(
        lambda x: quantized_einsum.quantized_einsum(
          "AB,BC->AC", x, x, recipe=tensors
        ).sum()
      ),
      jnp.ones((2, 2)),
    )


def _program(tensors: recipe.Recipe, dtype=jnp.bfloat16) -> str:
  equation = "BTD,DF->BTF"
  lhs, rhs, gradient = (
    jax.device_put(np.asarray(x, dtype)) for x in _operands(equation)
  )
  state = quantized_einsum.initial_state(tensors)
  return _matmuls.lower(
    equation, lhs, rhs, gradient, state, tensors=tensors
  ).as_text()


@pytest.mark.parametrize(
  ("tensors", "kinds", "maxima"),
  [
    pytest.param(FP8, "fp8", 3, id="current"),
    # Those of the histories, too.
    pytest.param(
      _recipe("fp8", scaling=recipe.Delayed()), "fp8", 6, id="delayed"
    ),
    # The operands of three products.
    pytest.param(INT8_ROWS, "int8", 6, id="channel"),
  ],
)
def test_a_program_has_three_low_precision_matmuls_and_no_repeated_maximum(
  tensors, kinds, maxima
):
  text = _program(tensors)
  dots = re.findall(
    r"dot_general.*: \(tensor<(.*?)>, tensor<(.*?)>\) -> ", text
  )
  types = [tuple(t.rpartition("x")[2] for t in dot) for dot in dots]
  assert (
    types
    == {
      "fp8": [
        ("f8E4M3FN", "f8E4M3FN"),
        ("f8E5M2", "f8E4M3FN"),
        ("f8E4M3FN", "f8E5M2"),
      ],
      "int8": [("i8", "i8")] * 3,
    }[kinds]
  )
  assert len(re.findall(r"stablehlo.reduce\(.*maximum", text)) == maxima


def test_scanned_rematerialized_layers_have_separate_states():
  tensors = _recipe("fp8", scaling=recipe.Delayed(history_length=2))
  kernels = jax.random.normal(jax.random.key(0), (3, 8, 8))
  states = {
    name: jnp.ones((3, 2)) * jnp.arange(1.0, 4)[:, None]
    for name in quantized_einsum.initial_state(tensors)
  }

  def layer(x, variables):
    kernel, state = variables
    y = quantized_einsum.quantized_einsum(
      "BD,DF->BF", x, kernel, recipe=tensors, state=state
    )
    return jnp.tanh(y), None

  def scanned(kernels, states):
    x = jnp.linspace(-2.0, 2.0, 16).reshape(2, 8)
    return jax.lax.scan(jax.checkpoint(layer), x, (kernels, states))[0].sum()

  def unrolled(kernels, states):
    x = jnp.linspace(-2.0, 2.0, 16).reshape(2, 8)
    for i in range(3):
      x, _ = layer(x, jax.tree.map(lambda v, i=i: v[i], (kernels, states)))
    return x.sum()

  got = jax.jit(jax.grad(scanned, (0, 1)))(kernels, states)
  expected = jax.jit(jax.grad(unrolled, (0, 1)))(kernels, states)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6), got, expected
  )


@pytest.mark.parametrize(
  ("initial_scale", "reached"), [(1.0, 1), (2.0**-26, 3)]
)
def test_a_small_initial_scale_lets_the_first_gradients_through(
  initial_scale, reached
):
  """In e5m2 the mean's gradients are zeros without; a layer a step mends it."""
  tensors = dataclasses.replace(
    FP8,
    gradient=recipe.TensorRecipe(
      E5M2, scaling=recipe.Delayed(initial_scale=initial_scale)
    ),
  )
  state = quantized_einsum.initial_state(tensors)

  @jax.jit
  def states(state):
    def loss(states):
      x = jnp.eye(8)
      for layer in states:
        x = quantized_einsum.quantized_einsum(
          "BD,DF->BF", x, jnp.eye(8), recipe=tensors, state=layer
        )
      return 1e-6 * x.mean()

    return jax.grad(loss)([state] * 3)

  name = quantized_einsum.history_name("gradient")
  assert sum(float(layer[name][0]) > 0 for layer in states(state)) == reached
