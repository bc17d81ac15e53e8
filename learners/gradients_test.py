"""Tests for gradients over microbatches, compared with the full batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import gradients, loss_function, microbatches, testing
from paxon.learners import metrics as metrics_lib
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes
from paxon.sharding import variables

ROWS, LENGTH, VOCAB, EMBED = 16, 12, 24, 8
OVERWRITE = variables.UpdateRule.OVERWRITE_WITH_GRADIENT
REPLACE = variables.UpdateRule.REPLACE
SPECS = {
  "params": {
    "table": testing.spec(
      "params/table", (VOCAB, EMBED), axes=("vocab", "embed")
    ),
    "head": testing.spec(
      "params/head", (EMBED, VOCAB), axes=("embed", "vocab")
    ),
  },
  "fp8": {
    "scale": testing.spec(
      "fp8/scale",
      (),
      update=OVERWRITE,
      combine=variables.CombineRule.MAX,
    )
  },
  "stats": {"mean": testing.spec("stats/mean", (), update=REPLACE)},
}


@jax.custom_vjp
def _scaled(x, scale):
  """`x`; the gradient of `scale` is the largest absolute value of `x`."""
  del scale
  return x


_scaled.defvjp(
  lambda x, scale: (x, jnp.max(jnp.abs(x))), lambda amax, g: (g, amax)
)


def _loss(values, batch, rngs):
  """Tokens see the mean of their segment's tokens so far."""
  segments = batch["segment_ids"]
  seen = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(
    jnp.ones((LENGTH, LENGTH), bool)
  )[None]
  seen = seen.astype(jnp.float32)
  share = seen / jnp.sum(seen, axis=-1, keepdims=True)
  x = values["params"]["table"][batch["inputs"]]
  x = _scaled(x, values["fp8"]["scale"])
  x = jnp.tanh(jnp.einsum("BTS,BSD->BTD", share, x))
  logits = batch["temperature"] * jnp.einsum(
    "BTD,DV->BTV", x, values["params"]["head"]
  )
  nll = -jnp.take_along_axis(
    jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1
  )[..., 0]
  metrics = {"rows": (jnp.float32(x.shape[0]), jnp.float32(1))}
  if rngs:
    noise = jax.random.normal(rngs["dropout"], ())
    metrics |= {"noise": (noise, jnp.float32(1)), "square": (noise**2, noise)}
  return loss_function.LossOutput(
    loss=metrics_lib.total(nll, weights=batch["weights"]),
    metrics=metrics,
    outputs={"token_nll": nll},
    new_collections={"stats": {"mean": jnp.mean(x)}},
  )


def _values():
  random = np.random.default_rng(0)
  values = jax.tree.map(
    lambda s: jax.device_put(np.float32(random.normal(size=s.shape))), SPECS
  )
  values["fp8"] = {"scale": jnp.float32(1)}
  return values


def _batch():
  random = np.random.default_rng(1)
  tokens = random.integers(0, VOCAB, size=(ROWS, LENGTH + 1))
  # Packed: up to three segments a row, then padding, of which row 0 is full.
  lengths = random.integers(0, 5, size=(ROWS, 3))
  lengths[0] = 0
  segments = np.zeros((ROWS, LENGTH), np.int32)
  for row, parts in zip(segments, lengths, strict=True):
    ends = np.cumsum(parts)
    for i, (end, size) in enumerate(zip(ends, parts, strict=True)):
      row[end - size : end] = i + 1
  # Rows 0, 2, 4 ... have few targets that count.
  kept = (
    random.random((ROWS, LENGTH))
    < np.where(np.arange(ROWS) % 2, 0.9, 0.2)[:, None]
  )
  return {
    "inputs": jax.device_put(np.int32(tokens[:, :-1])),
    "targets": jax.device_put(np.int32(tokens[:, 1:])),
    "segment_ids": jax.device_put(segments),
    "weights": jax.device_put(np.float32((segments > 0) & kept)),
    "temperature": jnp.float32(0.7),
  }


def _count(batch, outputs):
  nll, weights = outputs["token_nll"], batch["weights"]
  return {
    "tokens": metrics_lib.total(jnp.ones_like(nll), weights=weights),
    **metrics_lib.maximum("nll", nll, weights=weights),
    **metrics_lib.histogram("nll", nll, weights=weights, low=0.0, high=9.0),
  }


def _run(num_microbatches, *, batch=None, rngs=None):
  fn = gradients.make_gradient_fn(
    _loss,
    metric_fns=(_count,),
    num_microbatches=num_microbatches,
    specs=SPECS,
  )

  def run(values, batch):
    result = fn(
      gradients.Variables(
        params={"params": values["params"]},
        overwritten={"fp8": values["fp8"]},
        constant={"stats": values["stats"]},
      ),
      batch,
      rngs or {},
    )
    return (
      result.params,
      result.overwritten,
      result.new_collections,
      result.metrics,
    )

  return run, (_values(), batch or _batch())


@functools.cache
def _compiled(num_microbatches):
  return jax.jit(_run(num_microbatches)[0])


def _alone(num_microbatches, *, batch=None, rngs=None):
  if rngs is None:
    return _compiled(num_microbatches)(_values(), batch or _batch())
  run, args = _run(num_microbatches, batch=batch, rngs=rngs)
  return jax.jit(run)(*args)


def _assert_same(actual, expected):
  for a, e in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    largest = float(np.max(np.abs(e)))
    np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-6 * largest)


@pytest.mark.parametrize("num_microbatches", [2, 4, 8, 16])
def test_equals_the_full_batch_under_masks_and_packing(num_microbatches):
  params, fp8, stats, metrics = _alone(num_microbatches)
  whole_params, whole_fp8, whole_stats, whole_metrics = _alone(1)
  _assert_same(params, whole_params)
  # The largest value of all microbatches, not their sum.
  assert float(fp8["fp8"]["scale"]) == float(whole_fp8["fp8"]["scale"])
  np.testing.assert_allclose(
    stats["stats"]["mean"], whole_stats["stats"]["mean"], rtol=1e-5
  )
  for name in set(metrics) - {"rows"}:
    for value, whole in zip(metrics[name], whole_metrics[name], strict=True):
      np.testing.assert_allclose(value, whole, rtol=1e-6)
  assert [float(x) for x in metrics["rows"]] == [ROWS, num_microbatches]


def test_mean_of_means_is_a_different_gradient():
  """So that the test above can fail."""
  parts, shared = microbatches.split(_batch(), num_microbatches=2)
  halves = [
    _alone(1, batch={k: x[i] for k, x in parts.items()} | shared)[0]
    for i in range(2)
  ]
  mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
  whole = _alone(1)[0]
  largest = max(
    jax.tree.leaves(
      jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), mean, whole)
    )
  )
  assert largest > 1e-3


def test_matches_float64_differences():
  params = _alone(4)[0]["params"]
  values = jax.tree.map(lambda x: np.asarray(x, np.float64), _values())
  batch = {k: np.asarray(x) for k, x in _batch().items()}

  def mean_loss():
    table, head = values["params"]["table"], values["params"]["head"]
    total = 0.0
    for row, t in np.argwhere(batch["weights"] > 0):
      segments = batch["segment_ids"][row]
      seen = [s for s in range(t + 1) if segments[s] == segments[t]]
      x = np.tanh(table[batch["inputs"][row][seen]].mean(0))
      logits = float(batch["temperature"]) * (x @ head)
      total += np.log(np.exp(logits).sum()) - logits[batch["targets"][row, t]]
    return total / batch["weights"].sum()

  for name, index in (("table", (3, 1)), ("head", (2, 5)), ("head", (7, 0))):
    array = values["params"][name]
    array[index] += 1e-5
    above = mean_loss()
    array[index] -= 2e-5
    below = mean_loss()
    array[index] += 1e-5
    np.testing.assert_allclose(
      params[name][index], (above - below) / 2e-5, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=4,tensor=2", "data=2,fsdp=4"])
def test_equals_the_full_batch_under_parallelism(mesh):
  layout = layouts.Layout(meshes.make_mesh(meshes.MeshSpec.parse(mesh)))
  run, (values, batch) = _run(2)
  shardings = layout.shardings(SPECS)
  placed = jax.device_put(jax.device_get(values), shardings)
  rows = {
    k: jax.device_put(np.asarray(x), layout.batch_sharding(x.ndim))
    for k, x in batch.items()
  }
  params, fp8, stats, metrics = layout.jit(run)(placed, rows)
  whole_params, whole_fp8, whole_stats, whole_metrics = _alone(1)
  _assert_same(params, whole_params)
  _assert_same(fp8, whole_fp8)
  np.testing.assert_allclose(metrics["loss"], whole_metrics["loss"], rtol=1e-6)
  np.testing.assert_allclose(
    stats["stats"]["mean"], whole_stats["stats"]["mean"], rtol=1e-5
  )
  # Sums of gradients are split like their parameters.
  for name, x in params["params"].items():
    expected = shardings["params"][name]
    assert x.sharding.is_equivalent_to(expected, x.ndim)


def test_no_sequence_moves_between_devices():
  layout = layouts.Layout(meshes.make_mesh(meshes.MeshSpec.parse("data=8")))
  x = jax.device_put(_batch()["inputs"], layout.batch_sharding(2))
  compiled = layout.jit(
    lambda x: microbatches.split({"inputs": x}, num_microbatches=2)[0]
  ).lower(x)
  text = compiled.compile().as_text()
  assert not any(
    collective in text
    for collective in ("all-gather", "all-to-all", "collective-permute")
  )


def test_microbatches_have_different_random_keys():
  key = jax.random.key(3)
  metrics = _alone(2, rngs={"dropout": key})[3]
  noise = [
    float(jax.random.normal(jax.random.fold_in(key, i), ())) for i in range(2)
  ]
  np.testing.assert_allclose(metrics["noise"], (sum(noise), 2), rtol=1e-6)
  whole = _alone(1, rngs={"dropout": key})[3]
  np.testing.assert_allclose(whole["noise"][0], jax.random.normal(key, ()))


def test_gradient_of_a_padding_batch_is_zero():
  batch = _batch() | {"weights": jnp.zeros((ROWS, LENGTH))}
  for leaf in jax.tree.leaves(_alone(2, batch=batch)[0]):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_batch_sizes_must_divide():
  with pytest.raises(
    ValueError,
    match=r"16 sequences of batch\['inputs'\] are not a multiple .*=3",
  ):
    _alone(3)


def test_batch_sizes_must_agree():
  batch = _batch() | {"extra": jnp.zeros((VOCAB,))}
  with pytest.raises(
    ValueError,
    match=r"batch\['inputs'\] has 16 sequences and batch\['extra'\] has",
  ):
    _alone(2, batch=batch)


def test_microbatches_must_cover_the_mesh():
  layout = layouts.Layout(meshes.make_mesh(meshes.MeshSpec.parse("data=8")))
  run, args = _run(4)
  with pytest.raises(
    ValueError,
    match=r"num_microbatches=4 leaves 4 sequences .* does not divide by data=8",
  ):
    layout.jit(run)(*args)


def test_noise_scale_of_a_quadratic():
  # The gradient of sequence i is p - x_i, so the noise scale is the variance
  # of x over |p - mean of x|^2.
  specs = {"params": {"p": testing.spec("params/p", (5,))}}

  def loss_fn(values, batch, rngs):
    del rngs
    errors = values["params"]["p"][None] - batch["x"]
    loss = jnp.sum(jnp.square(errors)) / 2, jnp.float32(errors.shape[0])
    return loss_function.LossOutput(loss, {}, {}, {})

  fn = gradients.make_gradient_fn(
    loss_fn,
    metric_fns=(),
    num_microbatches=8,
    specs=specs,
    measure_noise=True,
  )
  values = gradients.Variables(
    params={"params": {"p": jnp.full((5,), 2.0)}}, overwritten={}, constant={}
  )

  @jax.jit
  def measure(x):
    return fn(values, {"x": x}, {}).metrics[gradients.NOISE_SCALE]

  random = np.random.default_rng(0)
  total = np.zeros(2)
  for step in range(50):
    x = random.normal(scale=3.0, size=(64, 5)).astype(np.float32)
    found = np.array(measure(jnp.asarray(x)))
    total += found
    if step == 0:
      # By the definition; microbatch i of 8 has the sequences i, i + 8, ...
      parts = 2 - x.reshape(8, 8, 5).astype(np.float64).mean(axis=0)
      small = np.mean(np.sum(parts**2, axis=1))
      big = np.sum((2 - x.astype(np.float64).mean(axis=0)) ** 2)
      expected = (small - big) / (1 / 8 - 1 / 64), (64 * big - 8 * small) / 56
      np.testing.assert_allclose(found, expected, rtol=1e-5)
  # 45 / 20.
  np.testing.assert_allclose(total[0] / total[1], 2.25, rtol=0.1)
