"""Tests that what layers sow arrives as metrics, however the model runs."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import remat, stack, summaries
from paxon.learners import gradients
from paxon.learners import metrics as metrics_lib
from paxon.runner.training import model_loss
from paxon.sharding import layout as layouts
from paxon.sharding import logical, rules, variables
from paxon.sharding import mesh as meshes

ROWS, WIDTH = 16, 8


class _Block(nn.Module):
  """A residual layer that tells the size of what it gets, and another value."""

  scale: float

  @nn.compact
  def __call__(self, x):
    init = logical.partitioned(nn.initializers.lecun_normal(), (None, None))
    kernel = self.param("kernel", init, (WIDTH, WIDTH))
    summaries.summarize(self, "rms", jnp.sqrt(jnp.mean(jnp.square(x))))
    if self.scale > 1:
      summaries.summarize(self, "scale", self.scale)
    return x + self.scale * jnp.tanh(x @ kernel)


class _Model(nn.Module):
  """Also says one value twice, and one in bfloat16."""

  stack: nn.Module

  def loss(self, batch, *, deterministic=True):
    x = batch["x"]
    summaries.summarize(self, "twice", 1.0)
    summaries.summarize(self, "twice", jnp.bfloat16(3.0))
    y = self.stack(x)
    return (jnp.sum(jnp.square(y)), jnp.float32(y.shape[0])), {}, {}


def _model(*, num_layers=5, scan=True, policy=None):
  blocks = (_Block(scale=1.0), _Block(scale=2.0))
  return _Model(
    stack.Stack(blocks, num_layers=num_layers, scan=scan, remat_policy=policy)
  )


def _batch():
  x = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype(np.float32)
  return {"x": jnp.asarray(x)}


def _oracle(values, x, num_layers):
  """The sizes before each layer in float64, by the definition."""
  x = np.asarray(x, np.float64)
  sizes = []
  params = values["params"]["stack"]
  for i in range(num_layers):
    group, slot = divmod(i, 2)
    if f"layers_{i}" in params:
      kernel = params[f"layers_{i}"]["kernel"]
    else:
      kernel = params["layers"][f"blocks_{slot}"]["kernel"][group]
    sizes.append(np.sqrt(np.mean(x**2)))
    x = x + (1 + slot) * np.tanh(x @ np.asarray(kernel, np.float64))
  return sizes


def _shown(metrics):
  totals = metrics_lib.Totals()
  totals.add(metrics)
  means = totals.means()
  return {k: v for k, v in means.items() if k.startswith("summaries/")}


def _setup(**options):
  model, batch = _model(**options), _batch()
  specs = variables.specs_of(model_loss.abstract_variables(model, batch))
  values = jax.jit(lambda: variables.unbox(model_loss.init(model, batch)))()
  loss_fn = model_loss.make_loss_fn(model, specs=specs, deterministic=False)
  return loss_fn, specs, values, batch


@pytest.mark.parametrize(
  "policy", [None, remat.save_nothing], ids=["", "remat"]
)
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("num_layers", [1, 4, 5])
def test_values_are_those_of_numpy(num_layers, scan, policy):
  loss_fn, specs, values, batch = _setup(
    num_layers=num_layers, scan=scan, policy=policy
  )
  gradient_fn = gradients.make_gradient_fn(
    loss_fn, metric_fns=(), num_microbatches=1, specs=specs
  )
  result = jax.jit(
    lambda values, batch: gradient_fn(_variables(values), batch, {}).metrics
  )(values, batch)
  shown = _shown(result)
  expected = _oracle(values, batch["x"], num_layers)
  wanted = {
    f"summaries/stack/layers/{i}/rms": size for i, size in enumerate(expected)
  }
  wanted |= {
    f"summaries/stack/layers/{i}/scale": 2.0 for i in range(1, num_layers, 2)
  }
  wanted["summaries/twice"] = 2.0
  assert shown.keys() == wanted.keys()
  for name, value in wanted.items():
    assert shown[name] == pytest.approx(value, rel=1e-5), name


def test_microbatches_are_averaged():
  loss_fn, specs, values, batch = _setup()
  gradient_fn = gradients.make_gradient_fn(
    loss_fn, metric_fns=(), num_microbatches=4, specs=specs
  )
  metrics = jax.jit(
    lambda values, batch: gradient_fn(_variables(values), batch, {}).metrics
  )(values, batch)
  shown = _shown(metrics)
  parts = [_oracle(values, batch["x"][i::4], 5) for i in range(4)]
  for i, expected in enumerate(np.mean(parts, axis=0)):
    assert shown[f"summaries/stack/layers/{i}/rms"] == pytest.approx(
      expected, rel=1e-5
    )


def test_devices_tell_the_value_of_the_whole_batch():
  loss_fn, _, values, batch = _setup()
  mesh = meshes.make_mesh(meshes.MeshSpec.parse("data=8"))
  layout = layouts.Layout(mesh, rules.DEFAULT_RULES)
  step = layout.jit(
    lambda values, batch: loss_fn(values, batch, {}).metrics,
    in_shardings=(layout.replicated, layout.sharding(("batch", None))),
    out_shardings=layout.replicated,
  )
  shown = _shown(step(values, batch))
  assert len(jax.devices()) == 8
  for i, expected in enumerate(_oracle(values, batch["x"], 5)):
    assert shown[f"summaries/stack/layers/{i}/rms"] == pytest.approx(
      expected, rel=1e-5
    )


def test_summaries_are_neither_variables_nor_in_evaluation():
  _, specs, values, batch = _setup()
  assert set(specs) == set(values) == {"params"}
  loss_fn = model_loss.make_loss_fn(_model(), specs=specs, deterministic=True)
  assert _shown(loss_fn(values, batch, {}).metrics) == {}


def test_they_do_not_change_gradients():
  loss_fn, specs, values, batch = _setup()
  gradient_fn = gradients.make_gradient_fn(
    loss_fn, metric_fns=(), num_microbatches=1, specs=specs
  )
  told = gradient_fn(_variables(values), batch, {}).params
  silent = jax.grad(
    lambda values: _model().apply(values, batch, method="loss")[0][0] / ROWS
  )(values)
  jax.tree.map(np.testing.assert_array_equal, told, silent)


def test_sown_arrays_of_other_dimensions_are_averaged():
  sown = {"head": {"z": (jnp.arange(4.0), jnp.ones((2, 3)))}}
  [(name, pair)] = model_loss.summary_metrics(sown, specs={}).items()
  assert name == "summaries/head/z"
  assert float(pair[0]) == 2.5
  assert float(pair[1]) == 2.0


def test_a_path_like_that_of_a_stack_needs_its_dimension():
  sown = {"layers": {"blocks_0": {"z": (jnp.float32(1),)}}}
  with pytest.raises(ValueError, match=r"layers/\[0::1\]/z has the shape \(\)"):
    model_loss.summary_metrics(sown, specs={})


def _variables(values):
  return gradients.Variables(params=values, overwritten={}, constant={})


class _Detailed(nn.Module):
  """A block with a summary of the second level."""

  @nn.compact
  def __call__(self, x):
    summaries.summarize(self, "rms", jnp.sqrt(jnp.mean(jnp.square(x))))
    summaries.summarize(self, "largest", jnp.max(jnp.abs(x)), level=1)
    return 2 * x


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_level_adds_the_summaries_up_to_it(level):
  model, batch = _Model(stack.Stack((_Detailed(),), num_layers=2)), _batch()
  loss_fn = model_loss.make_loss_fn(
    model, specs={}, deterministic=False, summary_level=level
  )
  result = jax.jit(lambda batch: loss_fn({}, batch, {}).metrics)(batch)
  shown = _shown(result)
  names = {name.rpartition("/")[2] for name in shown}
  assert names == {"rms", "twice", *(("largest",) if level else ())}
  if level:
    largest = np.abs(batch["x"]).max()
    assert shown["summaries/stack/layers/0/largest"] == pytest.approx(largest)
    assert shown["summaries/stack/layers/1/largest"] == pytest.approx(
      2 * largest
    )
