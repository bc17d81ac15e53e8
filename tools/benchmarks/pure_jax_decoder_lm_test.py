"""The plain JAX train step and ours compute the same, with no shared code."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.inputs import synthetic_lm_input
from paxon.tools.benchmarks import (
  decoder_lm_workload,
  flax_decoder_lm,
  pure_jax_decoder_lm,
  pure_jax_generation,
  torch_decoder_lm,
  tuned_jax_forward,
)

STEPS = 5


def _workload(**config) -> decoder_lm_workload.Workload:
  sizes = {
    "vocab_size": 40,
    "num_layers": 2,
    "embed_dim": 32,
    "mlp_dim": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "warmup_steps": 2,
    "total_steps": 6,
  }
  return decoder_lm_workload.Workload(
    config=pure_jax_decoder_lm.Config(**{**sizes, **config}),
    global_batch_size=4,
    length=32,
  )


class _Packed(synthetic_lm_input.SyntheticLmInput):
  """Several documents in a sequence, and some padding."""

  def get_next(self):
    batch = super().get_next()
    random = np.random.default_rng(self._next)
    shape = batch["inputs"].shape
    begins = random.random(shape) < 4 / self.length
    indices = np.broadcast_to(np.arange(self.length), shape)
    starts = np.maximum.accumulate(indices * begins, axis=1)
    padding = indices >= self.length - random.integers(0, 4, (shape[0], 1))
    batch["segment_ids"] = (1 + np.cumsum(begins, axis=1)).astype(np.int32)
    batch["positions"] = (indices - starts).astype(np.int32)
    return {
      k: np.where(padding, 0, x).astype(x.dtype) for k, x in batch.items()
    }


def _trained(workload: decoder_lm_workload.Workload):
  """Returns both states after some steps, each step's metrics, our first."""
  job = workload.job(
    train_input=_Packed(
      global_batch_size=workload.global_batch_size,
      length=workload.length,
      vocab_size=workload.config.vocab_size,
      random_seed=0,
    )
  )
  ours = decoder_lm_workload.compile_ours(job, devices=jax.devices()[:1])
  first = ours.start(count=1)
  second = decoder_lm_workload.pure_jax_steps(ours, workload, count=1)
  metrics = []
  initial = jax.device_get(decoder_lm_workload.to_pure_jax(first.state))
  state, other = first.state, second.state
  for i in range(STEPS):
    batch = ours.batches[i % len(ours.batches)]
    keys = decoder_lm_workload.PURE_JAX_KEYS
    state, pairs = ours.step(state, batch)
    other, values = second.step(other, {k: batch[k] for k in keys})
    means = {name: pair[0] / pair[1] for name, pair in pairs.items()}
    metrics.append((jax.device_get(means), jax.device_get(values)))
  return decoder_lm_workload.to_pure_jax(state), other, metrics, initial


def _distance(a, b) -> float:
  a, b = (np.asarray(x, np.float64) for x in (a, b))
  return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture(scope="module", name="float32")
def _float32():
  return _trained(_workload())


def test_metrics_agree_with_ours_at_every_step(float32):
  for means, values in float32[2]:
    assert values.keys() <= means.keys()
    for name, value in values.items():
      np.testing.assert_allclose(means[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("group", ["params", "mu", "nu"])
def test_state_agrees_with_ours_after_five_steps(float32, group):
  ours, theirs, *_ = float32
  assert ours["step"] == theirs["step"] == STEPS
  assert ours[group].keys() == theirs[group].keys()
  for name, value in theirs[group].items():
    assert _distance(ours[group][name], value) < 1e-5, name


def test_the_loss_falls(float32):
  losses = [values["loss"] for _, values in float32[2]]
  # The fifth batch is the first one again.
  assert losses[4] < losses[0] - 0.01


def test_bfloat16_agrees_within_its_precision():
  ours, theirs, metrics, _ = _trained(_workload(dtype="bfloat16"))
  for means, values in metrics:
    np.testing.assert_allclose(means["loss"], values["loss"], rtol=2e-3)
  for name, value in theirs["params"].items():
    assert value.dtype == np.float32
    assert _distance(ours["params"][name], value) < 2e-2, name


@pytest.mark.parametrize("block", [8, 12, 128])
def test_the_tuned_forward_pass_computes_the_same(monkeypatch, block):
  monkeypatch.setattr(tuned_jax_forward, "BLOCK", block)
  workload = _workload()
  c = workload.config
  params = pure_jax_decoder_lm.initial_state(c, jax.random.key(0))["params"]
  batch = _Packed(
    global_batch_size=4, length=32, vocab_size=40, random_seed=0
  ).get_next()

  def gradient(forward):
    run = jax.value_and_grad(pure_jax_decoder_lm.loss, has_aux=True)
    return jax.jit(lambda p, b: run(p, b, c, forward))(params, batch)

  expected = gradient(pure_jax_decoder_lm.forward)
  actual = gradient(tuned_jax_forward.forward)
  np.testing.assert_allclose(actual[0][0], expected[0][0], rtol=1e-5)
  for name, value in expected[1].items():
    assert _distance(actual[1][name], value) < 1e-5, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_torch_step_computes_the_same(dtype):
  pytest.importorskip("torch")
  workload = _workload(dtype=dtype)
  ours = decoder_lm_workload.compile_ours(
    workload.job(), devices=jax.devices()[:1]
  )
  plain = decoder_lm_workload.pure_jax_steps(ours, workload, count=1)
  state = jax.device_get(plain.state)
  step = torch_decoder_lm.TrainStep(workload.config, state, is_compiled=False)
  tolerance = 1e-5 if dtype == "float32" else 1e-2
  values = plain.state
  for i in range(STEPS):
    batch = decoder_lm_workload.pure_jax_batches(ours)[i % len(ours.batches)]
    values, metrics = plain.step(values, batch)
    theirs = step(step.place(batch))
    assert theirs.keys() == metrics.keys()
    for name in metrics:
      if dtype == "float32" or name != "accuracy":
        np.testing.assert_allclose(
          theirs[name], metrics[name], rtol=tolerance, err_msg=name
        )
  for name, value in values["params"].items():
    # Adam divides by gradients near zero.
    theirs = step.params[name].detach().numpy()
    assert _distance(theirs, value) < 3 * tolerance, name


def test_the_flax_step_computes_the_same():
  c = _workload().config
  # With key 0 Adam divides by a gradient so near zero that its rounding shows.
  values = pure_jax_decoder_lm.initial_state(c, jax.random.key(2))
  # Copied, because both steps donate their state.
  params = jax.tree.map(jnp.copy, values["params"])
  state = flax_decoder_lm.initial_state(c, params)
  batches = _Packed(
    global_batch_size=4, length=32, vocab_size=40, random_seed=0
  )
  first = jax.tree.map(jnp.asarray, batches.get_next())
  # The schedules of optax compare integers with floats.
  with jax.numpy_dtype_promotion("standard"):
    theirs = flax_decoder_lm.compile_step(c, state, first)
  plain = pure_jax_decoder_lm.compile_step(c, values, first)
  for batch in (first, batches.get_next(), batches.get_next()):
    values, expected = plain(values, batch)
    state, metrics = theirs(state, batch)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
  expected = flax_decoder_lm.from_pure_jax(values["params"])
  distances = jax.tree.map(_distance, state.params, expected)
  assert max(jax.tree.leaves(distances)) < 1e-5, distances


def test_its_own_initial_values_have_the_shapes_of_ours(float32):
  loaded = float32[3]
  own = pure_jax_decoder_lm.initial_state(_workload().config, jax.random.key(0))

  def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)

  assert shapes(own) == shapes(loaded)
  for name, value in own["params"].items():
    deviation = np.std(loaded["params"][name])
    np.testing.assert_allclose(np.std(value), deviation, rtol=0.2, atol=1e-6)


@pytest.mark.parametrize(
  ("module", "libraries"),
  [
    (pure_jax_decoder_lm, set()),
    (pure_jax_generation, set()),
    (tuned_jax_forward, set()),
    (flax_decoder_lm, {"flax", "flax.training", "optax"}),
  ],
)
def test_the_baselines_are_short_and_import_only_libraries(module, libraries):
  text = pathlib.Path(module.__file__).read_text()
  assert len(text.splitlines()) < 185
  nodes = list(ast.walk(ast.parse(text)))
  imported = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
  imported |= {
    a.name for n in nodes if isinstance(n, ast.Import) for a in n.names
  }
  standard = {"collections.abc", "dataclasses", "functools", "typing"}
  assert imported <= standard | {"jax", "jax.numpy"} | libraries
