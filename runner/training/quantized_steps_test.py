"""Tests that training with delayed scaling is what numpy computes, anywhere."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paxon.layers import linear, remat
from paxon.layers.stacks import stack
from paxon.learners import (
  learner,
  loss_function,
  schedules,
  train_state,
  train_step,
)
from paxon.learners.optimizers import sgd
from paxon.pipeline import spmd_pipeline, stage_sharding
from paxon.quantization import einsum, number_formats
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import initialization, layout, mesh, variables
from paxon.sharding import rules as rules_lib

LAYERS, BATCH, WIDTH, STEPS, RATE, HISTORY = 2, 8, 4, 50, 0.05, 5
# What histories hold that the loss does not reach.
KEPT = 3.0
FORMATS = {"lhs": 448.0, "rhs": 448.0, "gradient": 57344.0}
FIRST_SCALES = {"lhs": 1.0, "rhs": 1.0, "gradient": 2.0**-12}


def _operand(number_format, first_scale=1.0):
  scaling = recipe_lib.Delayed(
    history_length=HISTORY, margin=1, initial_scale=first_scale
  )
  return recipe_lib.TensorRecipe(number_format, scaling=scaling)


_RECIPE = recipe_lib.Recipe(
  lhs=_operand(number_formats.FP8_E4M3),
  rhs=_operand(number_formats.FP8_E4M3),
  gradient=_operand(number_formats.FP8_E5M2, FIRST_SCALES["gradient"]),
)


class Layer(nn.Module):
  """A product, and one that the loss does not depend on."""

  def _linear(self, name):
    provider = einsum.QuantizedEinsum(_RECIPE, parent=None)
    return linear.Linear(WIDTH, use_bias=False, einsum=provider, name=name)

  @nn.compact
  def __call__(self, x):
    """Returns `x` and a branch."""
    return x + self._linear("used")(x) + 0 * self._linear("unused")(x)


def _batches():
  rng = np.random.default_rng(0)
  wanted = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)
  for step in range(STEPS):
    # Growing and shrinking, so that values saturate and histories forget.
    size = 1 + 3 * (step % 10 == 4)
    x = (size * rng.normal(size=(BATCH, WIDTH))).astype(np.float32)
    yield {"x": x, "y": x @ wanted}


def _round(x, history, operand):
  """The definition of a delayed scale, and of a cast that saturates."""
  largest, amax = FORMATS[operand], np.max(history)
  scale = FIRST_SCALES[operand]
  if amax:
    scale = np.exp2(np.ceil(np.log2(2.0 * float(amax) / largest)))
  narrow = np.clip(x / np.float32(scale), -largest, largest)
  dtype = ml_dtypes.float8_e5m2
  if operand != "gradient":
    dtype = ml_dtypes.float8_e4m3fn
  return narrow.astype(dtype).astype(np.float32) * np.float32(scale)


def _simulated(kernels, divided_later):
  """Returns kernels and histories after all steps, step by step in numpy."""
  kernels = np.array(kernels)
  histories = {name: np.zeros((LAYERS, HISTORY), "f") for name in FORMATS}
  saturated = 0
  for batch in _batches():
    h, kept, seen = batch["x"], [], {name: [None] * LAYERS for name in FORMATS}
    for i in range(LAYERS):
      x, w = (
        _round(v, histories[name][i], name)
        for v, name in ((h, "lhs"), (kernels[i], "rhs"))
      )
      seen["lhs"][i], seen["rhs"][i] = np.abs(h).max(), np.abs(kernels[i]).max()
      saturated += np.abs(h).max() > 1.5 * np.abs(x).max()
      kept.append((x, w))
      h = h + x @ w
    weight = BATCH if divided_later else 1
    g = 2 * (h - batch["y"]) / BATCH * weight
    for i in reversed(range(LAYERS)):
      x, w = kept[i]
      narrow = _round(g, histories["gradient"][i], "gradient")
      seen["gradient"][i] = np.abs(g).max()
      g = g + narrow @ w.T
      kernels[i] -= RATE * (x.T @ narrow) / weight
    for name, values in histories.items():
      newest = np.array(seen[name], np.float32)[:, None]
      histories[name] = np.concatenate([newest, values[:, :-1]], axis=1)
  assert saturated, "the test must see values beyond their scale"
  return kernels, histories


def _stack(kind):
  if kind == "pipeline":
    return spmd_pipeline.PipelinedStack(
      [Layer()], num_layers=LAYERS, num_stages=2, num_microbatches=2
    )
  policy = remat.save_nothing if kind == "accumulated" else None
  return stack.Stack(
    [Layer()],
    num_layers=LAYERS,
    scan=kind != "unrolled",
    remat_policy=policy,
  )


_LAYOUTS = {
  "data": ("data=2", rules_lib.DEFAULT_RULES),
  "pipeline": (
    "stage=2",
    stage_sharding.with_stages(
      rules_lib.DEFAULT_RULES, num_stages=2, num_groups=LAYERS
    ),
  ),
}


@functools.cache
def _trained(kind):
  """Returns the first and last variables of a run by the learner."""
  model = _stack(kind)

  def init():
    x = jnp.zeros((BATCH, WIDTH), jnp.float32)
    return stack.Stack([Layer()], num_layers=LAYERS).init(jax.random.key(0), x)

  specs = variables.get_specs(jax.eval_shape(init))

  def loss_fn(values, batch, rngs):
    del rngs
    y = model.apply(values, batch["x"])
    error = jnp.sum((y - batch["y"]) ** 2)
    weight = jnp.float32(batch["x"].shape[0])
    return loss_function.LossOutput((error, weight), {}, {}, {})

  by = learner.Learner(
    optimizer=sgd.Sgd(schedule=schedules.Constant(value=RATE)),
    num_microbatches=2 if kind == "accumulated" else 1,
  )
  step = train_step.make_train_step(loss_fn, learner=by, specs=specs, seed=0)
  first = initialization.initial_values(specs, 0)
  # As after some steps: zeros that stay zeros would show nothing.
  unused = first["fp8"]["layers"]["blocks_0"]["unused"]["einsum"]["kernel"]
  for name, history in unused.items():
    unused[name] = jnp.full_like(history, KEPT)
  state = train_state.make_initial(first, learner=by, specs=specs)
  run, place = jax.jit(step), lambda x: x
  if kind in _LAYOUTS:
    text, rules = _LAYOUTS[kind]
    made = mesh.make_mesh(mesh.MeshSpec.parse(text), devices=jax.devices()[:2])
    laid_out = layout.Layout(made, rules)
    run = laid_out.jit(step)
    place = functools.partial(jax.device_put, device=laid_out.batch_sharding(2))
    state = jax.device_put(state, laid_out.replicated)
  for batch in _batches():
    state, _ = run(state, jax.tree.map(place, batch))
  return jax.device_get((first, state.variables))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  "kind", ["scan", "unrolled", "accumulated", "data", "pipeline"]
)
def test_fifty_steps_are_those_of_numpy(kind):
  first, last = _trained(kind)
  layers = last["params"]["layers"]["blocks_0"]
  start = first["params"]["layers"]["blocks_0"]
  kernels, histories = _simulated(
    start["used"]["kernel"], divided_later=kind == "accumulated"
  )
  state = last["fp8"]["layers"]["blocks_0"]["used"]["einsum"]["kernel"]
  for name, history in histories.items():
    np.testing.assert_allclose(
      state[f"{name}_amax_history"], history, rtol=2e-4, err_msg=name
    )
  np.testing.assert_allclose(
    layers["used"]["kernel"], kernels, rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize("kind", ["scan", "accumulated", "data", "pipeline"])
def test_what_the_loss_does_not_reach_keeps_its_state(kind):
  first, last = _trained(kind)
  unused = last["fp8"]["layers"]["blocks_0"]["unused"]["einsum"]["kernel"]
  for name, history in unused.items():
    assert history.shape == (LAYERS, HISTORY)
    np.testing.assert_array_equal(history, KEPT, err_msg=name)
  start, end = (v["params"]["layers"]["blocks_0"] for v in (first, last))
  np.testing.assert_array_equal(
    end["unused"]["kernel"], start["unused"]["kernel"]
  )
