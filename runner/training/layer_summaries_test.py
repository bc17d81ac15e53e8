"""Tests that what layers sow arrives as metrics, however the model runs."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import remat, summaries
from paxon.layers.stacks import stack
from paxon.learners import gradients
from paxon.learners import metrics as metrics_lib
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import example_views, model_loss, run_metrics
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
  specs = variables.get_specs(model_loss.abstract_variables(model, batch))
  values = jax.jit(lambda: variables.unbox(model_loss.init(model, batch)))()
  loss_fn = model_loss.make_loss_fn(model, specs=specs, deterministic=False)
  return loss_fn, specs, values, batch


@pytest.mark.nightly(keep=2)
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
  # Not compiled as a whole either: bits are compared.
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


class _Drawn(nn.Module):
  """A block with a histogram and an image of what it gets."""

  @nn.compact
  def __call__(self, x):
    summaries.record_histogram(self, "values", x)
    shares = jnp.mean(jnp.square(jnp.sin(x)), axis=0)
    summaries.record_image(self, "shares", shares.reshape(2, 4))
    summaries.summarize(self, "rms", jnp.sqrt(jnp.mean(jnp.square(x))))
    return 2 * x


class _Recorder(metrics_file.SummaryWriter):
  def __init__(self):
    self.histograms, self.images = {}, {}

  def write(self, step, split, values):
    raise AssertionError

  def write_histogram(self, step, split, name, histogram):
    self.histograms[step, split, name] = histogram

  def write_media(self, step, split, name, kind, content):
    assert kind == "image/png"
    self.images[step, split, name] = content

  def close(self):
    pass


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_arrays_of_each_layer_are_written(scan, num_microbatches):
  model = _Model(stack.Stack((_Drawn(),), num_layers=3, scan=scan))
  batch = _batch()
  loss_fn = model_loss.make_loss_fn(
    model, specs={}, deterministic=False, summary_level=1
  )
  gradient_fn = gradients.make_gradient_fn(
    loss_fn, metric_fns=(), num_microbatches=num_microbatches, specs={}
  )
  metrics = jax.jit(
    lambda batch: gradient_fn(_variables({}), batch, {}).metrics
  )(batch)
  numbers, arrays = run_metrics.split_arrays(metrics)
  assert {n.rpartition("/")[2] for n in _shown(numbers)} == {"rms", "twice"}
  writer = _Recorder()
  run_metrics.write_arrays(writer, 3, arrays)
  assert len(writer.histograms) == len(writer.images) == 3
  for layer in range(3):
    x = 2**layer * np.asarray(batch["x"], np.float64)
    name = f"summaries/stack/layers/{layer}"
    histogram = writer.histograms[3, "train", f"{name}/values"]
    # The mean of microbatches.
    assert histogram.count * num_microbatches == x.size
    assert histogram.total * num_microbatches == pytest.approx(
      x.sum(), rel=1e-4
    )
    assert histogram.minimum <= x.min() <= histogram.minimum / 2
    assert histogram.maximum / 2 <= x.max() <= histogram.maximum
    limits = [-np.inf, *histogram.limits]
    counts, _ = np.histogram(x, limits)
    np.testing.assert_array_equal(
      np.asarray(histogram.counts) * num_microbatches, counts
    )
    image = np.mean(np.sin(x) ** 2, axis=0).reshape(2, 4, 1)
    pixels = example_views.to_png(np.rint(255 * image).astype(np.uint8))
    assert writer.images[3, "train", f"{name}/shares"] == pixels


def test_arrays_of_devices_are_those_of_the_whole_batch():
  model, batch = _Model(stack.Stack((_Drawn(),), num_layers=2)), _batch()
  loss_fn = model_loss.make_loss_fn(
    model, specs={}, deterministic=False, summary_level=1
  )
  mesh = meshes.make_mesh(meshes.MeshSpec.parse("data=8"))
  layout = layouts.Layout(mesh, rules.DEFAULT_RULES)
  step = layout.jit(
    lambda batch: loss_fn({}, batch, {}).metrics,
    in_shardings=layout.sharding(("batch", None)),
    out_shardings=layout.replicated,
  )
  one = jax.jit(lambda batch: loss_fn({}, batch, {}).metrics)(batch)
  found, wanted = (run_metrics.split_arrays(x)[1] for x in (step(batch), one))
  assert len(wanted) == 2
  for name, (value, _) in wanted.items():
    np.testing.assert_allclose(found[name][0], value, rtol=1e-5, atol=1e-5)


def test_an_empty_histogram_is_none():
  assert run_metrics.to_histogram(np.zeros(68, np.float32)) is None
