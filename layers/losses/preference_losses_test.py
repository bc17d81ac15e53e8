"""Tests for preference losses, against float64 numpy and TRL's methods."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.losses import preference_losses

_GOLDENS = json.loads(
  (
    pathlib.Path(__file__).parent / "testdata/preference_losses.json"
  ).read_text()
)
_RANDOM = np.random.RandomState(0)
_LENGTH = np.asarray([[3, 5, 1, 9], [4, 5, 2, 1]], np.float64)
_LOG_PROB = -_LENGTH * np.asarray([[0.3, 1.1, 2.0, 0.01], [0.6, 0.2, 7.0, 3.0]])
_REFERENCE = _LOG_PROB + _RANDOM.standard_normal((2, 4))


def _log_sigmoid(x):
  return -np.log1p(np.exp(-x))


def _expected(name, log_prob, **options):
  """The definitions of the papers in numpy."""
  (w, z), (rw, rz), (nw, nz) = log_prob, _REFERENCE, _LENGTH
  beta = options["beta"]
  if name == "dpo":
    x = beta * ((w - rw) - (z - rz))
    smooth = options.get("label_smoothing", 0)
    return -(1 - smooth) * _log_sigmoid(x) - smooth * _log_sigmoid(-x)
  if name == "ipo":
    return ((w - rw) / nw - (z - rz) / nz - 1 / (2 * beta)) ** 2
  if name == "simpo":
    return -_log_sigmoid(beta * (w / nw - z / nz) - options["margin"])
  odds = [np.exp(x / n) / (1 - np.exp(x / n)) for x, n in ((w, nw), (z, nz))]
  return -w / nw - beta * _log_sigmoid(np.log(odds[0]) - np.log(odds[1]))


def _loss(name, log_prob, **options):
  answers = [
    preference_losses.Answers(*(jnp.asarray(x) for x in values))
    for values in zip(log_prob, _LENGTH, _REFERENCE, strict=True)
  ]
  return getattr(preference_losses, name)(*answers, **options)


def _differences(fn, x, step=1e-6):
  """Gradients of the sum of `fn` by central differences."""
  found = np.zeros_like(x)
  for at in np.ndindex(x.shape):
    e = np.zeros_like(x)
    e[at] = step
    found[at] = (fn(x + e).sum() - fn(x - e).sum()) / (2 * step)
  return found


@pytest.fixture(autouse=True)
def _x64():
  with jax.enable_x64(True):
    yield


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("dpo", {"beta": 0.1}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.1}),
    ("ipo", {"beta": 0.1}),
    ("orpo", {"beta": 0.25}),
    ("simpo", {"beta": 2.0, "margin": 1.0}),
  ],
)
def test_values_and_gradients(name, options):
  expected = functools.partial(_expected, name, **options)
  loss = functools.partial(_loss, name, **options)
  np.testing.assert_allclose(loss(_LOG_PROB), expected(_LOG_PROB), rtol=1e-12)
  gradient = jax.jit(jax.grad(lambda x: jnp.sum(loss(x))))(
    jnp.asarray(_LOG_PROB)
  )
  numeric = _differences(expected, _LOG_PROB)
  np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-7)


def _kto(log_prob, kl):
  answers = preference_losses.Answers(
    jnp.asarray(log_prob), jnp.asarray(_LENGTH[0]), jnp.asarray(_REFERENCE[0])
  )
  return preference_losses.kto(
    answers,
    jnp.asarray([True, False, True, False]),
    kl=jnp.asarray(kl),
    beta=0.2,
    desirable_weight=1.5,
    undesirable_weight=0.5,
  )


@pytest.mark.parametrize("kl", [0.7, -0.3])
def test_kto(kl):
  good = np.asarray([True, False, True, False])

  def expected(log_prob):
    x = 0.2 * (log_prob - _REFERENCE[0] - max(kl, 0))
    gain = 1 / (1 + np.exp(-np.where(good, x, -x)))
    return np.where(good, 1.5, 0.5) * (1 - gain)

  np.testing.assert_allclose(
    _kto(_LOG_PROB[0], kl), expected(_LOG_PROB[0]), rtol=1e-12
  )
  gradient = jax.jit(jax.grad(lambda x: jnp.sum(_kto(x, kl))))(
    jnp.asarray(_LOG_PROB[0])
  )
  numeric = _differences(expected, _LOG_PROB[0])
  np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-9)
  assert jax.jit(jax.grad(lambda k: jnp.sum(_kto(_LOG_PROB[0], k))))(kl) == 0


@pytest.mark.parametrize("case", _GOLDENS["answers"])
def test_as_trl(case):
  answers = [
    preference_losses.Answers(
      jnp.asarray(case[key]), jnp.ones(len(case[key]), np.float64)
    )
    for key in ("chosen", "rejected")
  ]
  loss = functools.partial(
    getattr(preference_losses, case["loss"]), **case["options"]
  )

  def total(chosen, rejected):
    return jnp.sum(
      loss(
        answers[0]._replace(log_prob=chosen),
        answers[1]._replace(log_prob=rejected),
      )
    )

  args = [answer.log_prob for answer in answers]
  np.testing.assert_allclose(loss(*answers), case["values"], rtol=2e-6)
  gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(*args)
  np.testing.assert_allclose(gradients, case["gradients"], rtol=2e-5)


@pytest.mark.parametrize("case", _GOLDENS["steps"])
def test_steps_of_the_trainers_of_trl(case):
  """In float64, with the means over a batch that their training steps take."""
  given = {k: jnp.asarray(v) for k, v in _GOLDENS["inputs"].items()}
  given["lengths"] = given["lengths"].astype(jnp.float64)
  pairs = _GOLDENS["answers"][0]
  start = jnp.asarray([pairs["chosen"], pairs["rejected"]])

  def loss(log_probs):
    answers = [
      preference_losses.Answers(*values)
      for values in zip(
        log_probs, given["lengths"], given["references"], strict=False
      )
    ]
    if case["loss"] == "kto":
      others = given["others"]
      return jnp.mean(
        preference_losses.kto(
          answers[0],
          given["labels"],
          kl=jnp.mean(others[0] - others[1]),
          beta=case["beta"],
          desirable_weight=1.5,
          undesirable_weight=0.5,
        )
      )
    name = getattr(preference_losses, case["loss"])
    return jnp.mean(name(*answers, beta=case["beta"]))

  start = start[: len(case["gradients"])]
  value, gradient = jax.jit(jax.value_and_grad(loss))(start)
  np.testing.assert_allclose(value, case["value"], rtol=1e-12)
  np.testing.assert_allclose(gradient, case["gradients"], rtol=1e-10)


def test_extreme_answers_are_finite():
  one, many = jnp.ones(2), jnp.asarray([0.0, -1e4])
  answers = preference_losses.Answers(many, one, many)
  for name in ("dpo", "ipo", "orpo", "simpo"):
    loss = functools.partial(getattr(preference_losses, name))

    def total(x, loss=loss):
      return jnp.sum(loss(answers._replace(log_prob=x), answers))

    value, gradient = jax.jit(jax.value_and_grad(total))(many)
    assert np.isfinite(value), name
    assert np.isfinite(gradient).all(), name


def test_a_reference_is_required():
  answers = preference_losses.Answers(jnp.zeros(1), jnp.ones(1))
  with pytest.raises(ValueError, match="there is none; set one, or use `orpo`"):
    preference_losses.dpo(answers, answers)
