"""Tests for vector-quantized autoencoders."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.layers import testing
from paxon.layers.models import vector_autoencoder
from paxon.layers.norms import batch_norm
from paxon.layers.quantizers import scalar, vector
from paxon.layers.vision import autoencoder

FIELDS = {"filters": 8, "multipliers": (1, 2), "time_strides": (1,)}
FIELDS |= {"num_blocks": 1, "num_groups": 4}
_AVERAGES = batch_norm.COLLECTION


def _model(quantizer, features):
  return vector_autoencoder.VectorAutoencoder(
    autoencoder.Encoder(output_dim=features, **FIELDS),
    quantizer,
    autoencoder.Decoder(output_dim=1, **FIELDS),
  )


def _rectangles(count):
  """Returns bright rectangles on black, like clothes of Fashion-MNIST."""
  random = np.random.RandomState(0)
  images = np.zeros((count, 8, 8, 1), np.float32)
  for image in images:
    (top, left), (height, width) = (
      random.randint(0, 5, 2),
      random.randint(2, 6, 2),
    )
    image[top : top + height, left : left + width] = random.uniform(0.4, 1)
  return 2 * images - 1


@pytest.mark.nightly
def test_trains_and_uses_its_codes():
  quantizer = vector.EmaVectorQuantizer(16, decay=0.9)
  model = _model(quantizer, 4)
  batch = {
    "images": _rectangles(64),
    "example_weights": np.ones(64, np.float32),
  }
  batch = jax.device_put(batch)
  values = testing.initial_values(model, batch)
  params, averages = values["params"], values[_AVERAGES]
  optimizer = optax.adam(3e-3)

  @jax.jit
  def step(params, averages, state):
    def loss(params):
      ((total, weight), metrics, _), changed = model.apply(
        {"params": params, _AVERAGES: averages},
        batch,
        deterministic=False,
        method="loss",
        mutable=[_AVERAGES],
      )
      return total / weight, (metrics, changed[_AVERAGES])

    grads, (metrics, averages) = jax.grad(loss, has_aux=True)(params)
    # Optax mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
      updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), averages, state, metrics

  state, found = optimizer.init(params), []
  for _ in range(150):
    params, averages, state, metrics = step(params, averages, state)
    found.append({k: float(x / w) for k, (x, w) in metrics.items()})
  assert found[-1]["reconstruction"] < 0.05 * found[0]["reconstruction"]
  assert found[-1]["coverage"] > 0.5
  ids = testing.apply(
    model, {"params": params, _AVERAGES: averages}, batch, method="encode"
  )
  assert ids.shape == (64, 4, 4, 1)
  assert len(np.unique(ids)) > 8


@pytest.mark.parametrize(
  ("quantizer", "num_codes"),
  [
    (scalar.FiniteScalarQuantizer((4, 3)), 12),
    (scalar.LookupFreeQuantizer(2), 4),
  ],
)
def test_loss_is_the_mean_over_real_examples(quantizer, num_codes):
  model = _model(quantizer, 2)
  images = jax.device_put(_rectangles(3))
  batch = {"images": images, "example_weights": jnp.asarray([1.0, 0.0, 2.0])}
  values = testing.random_values(model, batch)
  result: Any = testing.apply(model, values, batch, method="loss")
  (total, weight), metrics, outputs = result
  decoded = np.asarray(testing.apply(model, values, batch), np.float64)
  errors = ((decoded - np.asarray(images)) ** 2).mean((1, 2, 3))
  # Padding has no codes, so its row is another.
  found = np.asarray(outputs["row_error"])[[0, 2]]
  np.testing.assert_allclose(found, errors[[0, 2]], rtol=1e-5)
  added = float(metrics["quantizer"][0])
  expected = errors[0] + 2 * errors[2] + added
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  assert float(weight) == 3
  ids = np.asarray(testing.apply(model, values, batch, method="encode"))
  coverage, _ = metrics["coverage"]
  used = len(np.unique(ids[[0, 2]]))
  np.testing.assert_allclose(coverage, 3 * used / num_codes, rtol=1e-6)
  # Padding chooses no code.
  dirty = batch | {"images": images.at[1].set(9.0)}
  other = testing.apply(model, values, dirty, method="loss")
  np.testing.assert_allclose(other[0][0], total, rtol=1e-6)
  np.testing.assert_array_equal(other[1]["coverage"][0], metrics["coverage"][0])


def test_errors():
  model = _model(scalar.FiniteScalarQuantizer((4, 3)), 2)
  with pytest.raises(ValueError, match="needs batch\\['images'\\]"):
    testing.initial_values(model, {"inputs": jnp.ones((1, 8, 8, 1))})
  with pytest.raises(ValueError, match="reconstruction_weight"):
    model.clone(reconstruction_weight=0.0)
