"""Tests for classifiers, and for the poolings they use."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import linear, testing
from paxon.layers.losses import bi_tempered_loss
from paxon.layers.models import classifier
from paxon.layers.models import testing as models_testing

BATCH = {
  **models_testing.packed_batch([[5], [3], [6], [1]], 6),
  "labels": testing.array([2, 0, 5, 1], jnp.int32),
  "example_weights": testing.array([1.0, 1.0, 0.5, 0.0]),
}
MODEL = models_testing.tiny_classifier()


@pytest.fixture(name="values", scope="module")
def _values():
  return testing.random_values(MODEL, BATCH)


class Given(nn.Module):
  """An encoder of features: it returns what the batch has."""

  def __call__(self, x, *, deterministic):
    del deterministic
    return x


def _of_logits(**fields):
  """A classifier whose logits are `batch["features"]`."""
  return classifier.Classifier(
    encoder=Given(), head=nn.Dropout(0.0, deterministic=True), **fields
  )


def test_logits_are_the_head_of_the_mean_of_the_tokens(values):
  logits = testing.apply(MODEL, values, BATCH)
  states = testing.apply(
    MODEL.encoder,
    {"params": values["params"]["encoder"]},
    *models_testing.token_args(BATCH),
  )
  head = values["params"]["head"]
  for row, size in enumerate((5, 3, 6, 1)):
    mean = np.asarray(states[row, :size], np.float64).mean(0)
    expected = mean @ np.asarray(head["kernel"]) + np.asarray(head["bias"])
    np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-5)


def test_padding_has_no_influence(values):
  dirty = jnp.where(BATCH["segment_ids"] == 0, 9, BATCH["inputs"])
  run = jax.jit(MODEL.apply)
  np.testing.assert_array_equal(
    run(values, BATCH), run(values, {**BATCH, "inputs": dirty})
  )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_metrics_match_numpy(smoothing):
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((6, 7)).astype(np.float32)
  # Ties: the smaller class is first.
  logits[1] = 0.0
  labels = np.asarray([3, 5, 0, 6, 2, 1], np.int32)
  weights = np.asarray([1, 1, 0.5, 1, 0, 2], np.float32)
  model = _of_logits(input_keys=["features"], label_smoothing=smoothing)
  batch = {
    "features": jax.device_put(logits),
    "labels": jax.device_put(labels),
    "example_weights": jax.device_put(weights),
  }
  loss, metrics, outputs = testing.apply(model, {}, batch, method="loss")
  total = {"loss": 0.0, "nll": 0.0, "top1": 0.0, "top5": 0.0}
  for row, (x, label, weight) in enumerate(
    zip(logits.astype(np.float64), labels, weights, strict=True)
  ):
    log_probs = x - np.log(np.exp(x).sum())
    order = sorted(range(7), key=lambda c: (-x[c], c))
    total["nll"] -= weight * log_probs[label]
    total["loss"] -= weight * (
      (1 - smoothing) * log_probs[label] + smoothing * log_probs.mean()
    )
    total["top1"] += weight * (order[0] == label)
    total["top5"] += weight * (label in order[:5])
    np.testing.assert_allclose(
      outputs["label_probs"][row], np.exp(log_probs), rtol=1e-5
    )
  np.testing.assert_allclose(loss, (total["loss"], 5.5), rtol=1e-5)
  expected = {
    "cross_entropy": total["nll"],
    "accuracy": total["top1"],
    "error": 5.5 - total["top1"],
    "acc5": total["top5"],
    "error5": 5.5 - total["top5"],
  }
  assert set(metrics) == set(expected)
  for name, value in expected.items():
    np.testing.assert_allclose(metrics[name], (value, 5.5), rtol=1e-5)


def test_a_tempered_loss_has_the_smoothed_targets():
  tempered = bi_tempered_loss.BiTemperedLoss(first=0.7, second=1.4)
  fields = {"input_keys": ["features"], "label_smoothing": 0.2}
  model = _of_logits(**fields, tempered=tempered)
  logits = testing.normal(4, 6)
  (loss, _), _, _ = testing.apply(
    model, {}, {**BATCH, "features": logits}, method="loss"
  )
  targets = 0.8 * np.eye(6)[np.asarray(BATCH["labels"])] + 0.2 / 6
  of_example = tempered(logits, testing.array(targets))
  expected = np.sum(np.asarray(of_example * BATCH["example_weights"]))
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_training_moves_the_temperatures_of_a_ramp():
  last = bi_tempered_loss.BiTemperedLoss(first=0.7, second=1.4)
  ramp = bi_tempered_loss.RampedBiTemperedLoss(last, end_step=1)
  model = _of_logits(input_keys=["features"], tempered=ramp)
  batch = {**BATCH, "features": testing.normal(4, 6)}
  losses, state = [], {}
  for _ in range(2):
    ((loss, _), metrics, _), state = testing.apply(
      model,
      state,
      batch,
      deterministic=False,
      method="loss",
      mutable=["batch_stats"],
    )
    losses.append(loss)
  np.testing.assert_allclose(losses[0], metrics["cross_entropy"][0], rtol=1e-5)
  fixed = _of_logits(input_keys=["features"], tempered=last)
  expected, _, _ = testing.apply(fixed, {}, batch, method="loss")
  np.testing.assert_allclose(losses[1], expected[0], rtol=1e-5)


def test_of_fewer_than_five_classes_no_five_are_best():
  batch = {
    "features": jnp.zeros((1, 4)),
    "labels": jnp.zeros(1, jnp.int32),
    "example_weights": jnp.ones(1),
  }
  model = _of_logits(input_keys=("features",))
  metrics = testing.apply(model, {}, batch, method="loss")[1]
  assert set(metrics) == {"cross_entropy", "accuracy", "error"}


def test_predictions_need_no_label(values):
  batch = {k: BATCH[k] for k in ("inputs", "positions", "segment_ids")}
  result = testing.apply(MODEL, values, batch, method="predict")
  logits = testing.apply(MODEL, values, batch)
  np.testing.assert_array_equal(result["labels"], np.argmax(logits, axis=1))
  np.testing.assert_allclose(np.sum(result["label_probs"], 1), 1, rtol=1e-5)


def test_gradients_are_finite_and_reach_every_parameter(values):
  loss = lambda v: MODEL.apply(v, BATCH, method="loss")[0][0]  # noqa: E731
  gradients = jax.jit(jax.grad(loss))(values)
  gradients["params"]["encoder"]["embedding"].pop("bias", None)
  for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
    assert np.all(np.isfinite(gradient)), path
    assert np.any(gradient), path


def test_features_dropout_and_pooler_are_parts():
  model = classifier.Classifier(
    encoder=Given(),
    head=linear.Linear(3),
    pooler=linear.Linear(4, activation=jnp.tanh),
    dropout=nn.Dropout(0.5),
    input_keys=("features",),
  )
  batch = {"features": testing.normal(2, 4)}
  values = testing.random_values(model, batch)
  run = lambda key: model.apply(  # noqa: E731
    values, batch, deterministic=False, rngs={"dropout": jax.random.key(key)}
  )
  assert np.any(run(0) != run(1))
  pooler, head = (values["params"][name] for name in ("pooler", "head"))
  hidden = jnp.tanh(batch["features"] @ pooler["kernel"] + pooler["bias"][None])
  np.testing.assert_allclose(
    testing.apply(model, values, batch),
    hidden @ head["kernel"] + head["bias"][None],
    rtol=1e-5,
    atol=1e-6,
  )


@pytest.mark.parametrize(
  ("fn", "expected"),
  [
    (classifier.pool_first, [[0, 1], [6, 7], [12, 13]]),
    (classifier.pool_last, [[4, 5], [8, 9], [12, 13]]),
    (classifier.pool_mean, [[2, 3], [7, 8], [0, 0]]),
  ],
)
def test_poolings(fn, expected):
  x = jnp.arange(18.0).reshape(3, 3, 2)
  segments = testing.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]], jnp.int32)
  np.testing.assert_array_equal(fn(x, segments), expected)


def test_says_what_it_needs(values):
  for key in ("labels", "example_weights", "positions"):
    batch = {k: v for k, v in BATCH.items() if k != key}
    with pytest.raises(ValueError, match=rf"Classifier needs batch\['{key}'\]"):
      MODEL.apply(values, batch, method="loss")
  with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\)"):
    models_testing.tiny_classifier().clone(label_smoothing=1.0)
  with pytest.raises(ValueError, match=r"with pooling None it must have 2"):
    MODEL.clone(pooling=None).apply(values, BATCH)
