"""Tests for scores of documents, and for what a loss may return besides."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.losses import auxiliary_loss
from paxon.layers.models import document_scores
from paxon.layers.models import testing as models_testing
from paxon.layers.norms import layer_norm

BATCH = models_testing.packed_batch([[3, 2], [6], [1, 4]], 7)
MODEL = models_testing.tiny_decoder(num_layers=1)


def _outputs():
  """Row 0: right, wrong; row 1: right but for weight 0; row 2: right, right."""
  hits = np.ones((3, 7), np.float32)
  hits[0, 4] = hits[1, 2] = 0
  weights = np.array(BATCH["weights"])
  weights[1, 2] = 0
  weights[0, 1] = 0.5
  nll = np.random.default_rng(0).random((3, 7)).astype(np.float32)
  nll[1, 2] = np.nan
  return {
    "token_nll": jax.device_put(nll),
    "token_hits": jax.device_put(hits),
    "token_weights": jax.device_put(weights),
    "row_weight": jnp.sum(weights, axis=1),
  }


def test_scores_are_sums_over_each_document():
  outputs = _outputs()
  scores = document_scores.score_outputs(outputs, BATCH["segment_ids"])
  nll = np.nan_to_num(outputs["token_nll"] * outputs["token_weights"])
  expected = np.zeros((3, 7))
  expected[0, :2] = nll[0, :3].sum(), nll[0, 3:5].sum()
  expected[1, 0] = nll[1].sum()
  expected[2, :2] = nll[2, 0], nll[2, 1:5].sum()
  np.testing.assert_allclose(scores.log_likelihood, -expected, rtol=1e-6)
  np.testing.assert_array_equal(
    scores.length[:, :3], [[2.5, 2, 0], [5, 0, 0], [1, 4, 0]]
  )
  np.testing.assert_array_equal(
    scores.is_greedy[:, :2], [[True, False], [True, True], [True, True]]
  )


def test_strict_accuracy_counts_documents_and_rows():
  outputs = _outputs()
  metrics = document_scores.strict_accuracy(BATCH, outputs)
  assert metrics["strict_accuracy"] == (4, 5)
  assert metrics["strict_row_accuracy"] == (2, 3)
  # Documents and rows without a target that counts are none.
  outputs["token_weights"] = outputs["token_weights"].at[2].set(0)
  metrics = document_scores.strict_accuracy(BATCH, outputs)
  assert metrics["strict_accuracy"] == (2, 3)
  assert metrics["strict_row_accuracy"] == (1, 2)


def test_predictions_per_row():
  metrics = document_scores.predictions_per_row(BATCH, _outputs())
  assert metrics["predictions_per_row"] == (14.5, 3)


def test_scores_of_a_model_are_those_of_each_document_alone():
  values = testing.random_values(MODEL, BATCH, method="loss")
  run = jax.jit(lambda v, b: MODEL.apply(v, b, method="score"))
  together = run(values, BATCH)
  # Each document in a row of its own, of the same length.
  moved = {k: np.zeros((3, 7), np.array(x).dtype) for k, x in BATCH.items()}
  places = [(0, 0, 3), (0, 3, 5), (2, 1, 5)]
  for new, (row, start, end) in enumerate(places):
    for name, x in moved.items():
      x[new, : end - start] = BATCH[name][row, start:end]
  moved["segment_ids"] = (moved["segment_ids"] > 0).astype(np.int32)
  alone = run(values, jax.tree.map(jnp.asarray, moved))
  np.testing.assert_allclose(
    alone.log_likelihood[:, 0],
    [together.log_likelihood[i] for i in ((0, 0), (0, 1), (2, 1))],
    rtol=1e-5,
  )
  np.testing.assert_array_equal(alone.length[:, 0], [3, 2, 4])


def test_padded_examples_do_not_count():
  values = testing.random_values(MODEL, BATCH, method="loss")
  run = jax.jit(lambda b: MODEL.apply(values, b, method="loss"))
  some = run({**BATCH, "example_weights": testing.array([1.0, 0.0, 0.5])})
  weights = BATCH["weights"] * testing.array([1.0, 0.0, 0.5])[:, None]
  expected = run({**BATCH, "weights": weights})
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-6), some, expected
  )
  assert some[0][1] == 7.5


def test_inner_values_can_be_recorded():
  model = MODEL.clone(record=["activations", "logits"], logit_cap=3.0)
  args = models_testing.token_args(BATCH)
  values = testing.random_values(model, *args)
  outputs = testing.apply(model, values, BATCH, method="loss")[2]
  np.testing.assert_allclose(
    outputs["logits"], testing.apply(model, values, *args), rtol=1e-5, atol=1e-6
  )
  np.testing.assert_allclose(
    outputs["activations"],
    testing.apply(model, values, *testing.in_context(*args), method="hidden"),
    rtol=1e-5,
    atol=1e-6,
  )
  hash(model)
  with pytest.raises(ValueError, match=r"DecoderLm.record .* got 'logit'"):
    MODEL.clone(record=("logit",))


class Penalized(nn.Module, auxiliary_loss.Source):
  """A norm that adds a loss of a half."""

  def __call__(self, x):
    auxiliary_loss.add(self, "half", 0.5)
    return x


def test_the_loss_has_what_layers_add_and_scores_have_not():
  model = MODEL.clone(final_norm=Penalized())
  values = testing.random_values(model, BATCH, method="loss")
  with pytest.raises(ValueError, match="Penalized adds an auxiliary loss"):
    testing.apply(model, values, BATCH, method="loss")
  run = jax.jit(
    lambda b: model.apply(
      values, b, method="loss", mutable=[auxiliary_loss.COLLECTION]
    )[0]
  )
  loss, metrics, _ = run(BATCH)
  np.testing.assert_allclose(
    loss[0] - metrics["log_pplx"][0], 0.5 * 16, rtol=1e-4
  )
  assert metrics["auxiliary_loss/half"] == (8, 16)
  scores = testing.apply(model, values, BATCH, method="score")
  np.testing.assert_allclose(
    -np.sum(scores.log_likelihood), metrics["log_pplx"][0], rtol=1e-5
  )
  with pytest.raises(ValueError, match=r"auxiliary_loss_weight must not be"):
    MODEL.clone(auxiliary_loss_weight=-1.0)


def test_embedded_tokens_are_normed_before_the_stack():
  model = MODEL.clone(embedding_norm=layer_norm.LayerNorm(), final_norm=None)
  args = models_testing.token_args(BATCH)
  values = testing.random_values(model, *args)
  table = values["params"]["embedding"]["table"]
  normed = testing.apply(
    layer_norm.LayerNorm(),
    {"params": values["params"]["embedding_norm"]},
    table[args[0]],
  )
  expected = testing.apply(
    model.stack,
    {"params": values["params"]["stack"]},
    *testing.in_context(normed, *args[1:]),
  )
  np.testing.assert_allclose(
    testing.apply(model, values, *testing.in_context(*args), method="hidden"),
    expected,
    rtol=1e-5,
    atol=1e-6,
  )
