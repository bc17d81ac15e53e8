"""Tests of scaled runs; Pax's optimizer and metric are float64 numpy here."""

import dataclasses

import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.tasks.lm.params import c4, c4_scaled

_STEPS = 30
_TINY = {
  "num_layers": 2,
  "embed_dim": 16,
  "head_dim": 8,
  "length": 8,
  "global_batch_size": 4,
  "dtype": "float32",
  "num_train_steps": 100,
}


@dataclasses.dataclass(frozen=True)
class _Recipe:
  """Settings of Pax's class; `length` are the steps of its curve."""

  peak: float
  b2: float
  epsilon: float
  weight_decay: float
  max_norm: float
  max_rms: float
  warmup: int
  end: int
  length: int
  is_cosine: bool

  def rate(self, step: int) -> float:
    """Returns the rate of an update: a ramp from zero, then a decay."""
    warmup, end = (
      round(each * _TINY["num_train_steps"] / self.length)
      for each in (self.warmup, self.end)
    )
    if step <= warmup:
      return self.peak * step / warmup
    done = (step - warmup - 1) / (end - warmup - 1)
    if self.is_cosine:
      return self.peak * (0.1 + 0.45 * (1 + np.cos(np.pi * done)))
    return self.peak * 0.1**done


_C4 = _Recipe(*(1e-3, 0.99, 1e-6, 1e-3, 5.0, 1.0), 4000, 300_000, 54_000, False)
_GPT3 = _Recipe(
  *(2e-4, 0.95, 1e-8, 0.1, 1.0, np.inf), 265, 108_600, 19_000, True
)


class _Adam:
  """Pax's Adam on arrays by name, in float64."""

  def __init__(self, recipe, values):
    self._recipe = recipe
    self.values = {k: v.astype(np.float64) for k, v in values.items()}
    self._m = {k: np.zeros_like(v) for k, v in self.values.items()}
    self._v = {k: np.zeros_like(v) for k, v in self.values.items()}

  def update(self, gradients, step):
    recipe, b1, t = self._recipe, 0.9, step + 1
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    for name, g in gradients.items():
      g = g * min(1.0, recipe.max_norm / norm)
      m = self._m[name] = b1 * self._m[name] + (1 - b1) * g
      v = recipe.b2 * self._v[name] + (1 - recipe.b2) * g**2
      self._v[name] = v
      corrected = np.sqrt(v / (1 - recipe.b2**t)) + recipe.epsilon
      change = m / (1 - b1**t) / corrected
      # Layers are stacked, and each is clipped by itself.
      axes = tuple(range("stack/" in name, change.ndim))
      rms = np.sqrt((change**2).mean(axis=axes, keepdims=True))
      change = change / np.maximum(1, rms / recipe.max_rms)
      change = change + recipe.weight_decay * self.values[name]
      self.values[name] = self.values[name] - recipe.rate(step) * change


def _log_pplx(logits, batch):
  """Returns the weighted mean cross entropy."""
  logits = logits.astype(np.float64)
  top = logits.max(-1, keepdims=True)
  log_z = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
  picked = np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
  weights = batch["weights"].astype(np.float64)
  return ((log_z - picked) * weights).sum() / weights.sum()


@pytest.mark.parametrize(
  ("cls", "recipe"),
  [(c4_scaled.C4Scaled1M, _C4), (c4_scaled.Gpt3Scaled1M, _GPT3)],
)
def test_trains_as_pax(cls, recipe):
  job = fdl.build(cls(**_TINY).job())
  session = session_lib.open_session(job, devices=jax.devices()[:1])
  step = compiled_steps.compile_train_step(session)
  state, model = session.initial_state(), job.task.model
  names = jax.tree.map(lambda spec: spec.name, session.specs)

  def by_name(tree):
    pairs = jax.tree.map(lambda name, x: (name, np.array(x)), names, tree)
    return dict(jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x, tuple)))

  @jax.jit
  def differentiate(values, batch):
    def loss(values):
      (total, weight), _, outputs = model.clone(record=("logits",)).apply(
        values, batch, deterministic=True, method="loss"
      )
      return total / weight, outputs["logits"]

    return jax.value_and_grad(loss, has_aux=True)(values)

  adam = _Adam(recipe, by_name(state.variables))
  initial, random = dict(adam.values), np.random.default_rng(0)
  for n in range(_STEPS):
    batch = job.train_input.get_next()
    batch["weights"] *= random.choice([0, 0.5, 1], batch["weights"].shape)
    values = jax.tree.map(lambda k: adam.values[k].astype(np.float32), names)
    (_, logits), gradients = differentiate(values, batch)
    state, metrics = step(state, session.place(batch))
    total, weight = metrics["log_pplx"]
    expected = _log_pplx(np.asarray(logits), batch)
    assert float(total / weight) == pytest.approx(expected, rel=1e-5)
    rate = float(np.divide(*metrics["learning_rate"]))
    assert rate == pytest.approx(recipe.rate(n), rel=1e-5)
    adam.update(by_name(gradients), n)
  for name, found in by_name(state.variables).items():
    moved = np.abs(adam.values[name] - initial[name]).max()
    assert moved > 0
    # Relative to the way: 30 updates of about the peak rate.
    assert np.abs(found - adam.values[name]).max() <= 2e-3 * moved, name


@pytest.mark.parametrize(
  ("cls", "whole"),
  [
    (c4_scaled.C4Scaled30M, c4.C4Spmd16BAdam32Replicas),
    (c4_scaled.Gpt3Scaled30M, c4.C4SpmdPipelineGpt3SmallAdam64Replicas),
  ],
)
def test_only_sizes_differ_from_pax(cls, whole):
  sizes = {"documents", "mesh", "remat_policy", "max_positions", "vocab_size"}
  sizes |= {"warmup_steps", "decay_steps", "num_stages"}
  sizes |= {"pipeline_microbatch_size", *_TINY} - {"dtype"}
  sizes |= {"mlp_dim", "num_heads"}
  made, before = cls(), whole(exact=True)
  differ = {
    name
    for name in before.knobs()
    if getattr(made, name) != getattr(before, name)
  }
  assert {each for each in differ if not each.endswith("_every_steps")} <= sizes
