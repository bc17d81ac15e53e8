"""Tests for contrastive models of images and texts."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, linear, testing
from paxon.layers.losses import contrastive_losses
from paxon.layers.models import image_text
from paxon.layers.models import testing as models_testing
from paxon.sharding import layout, mesh

_LENGTH, _END = 6, 5


class _Texts(nn.Module):
  """Embeds ids, each for itself."""

  @nn.compact
  def __call__(self, ids, *args, deterministic):
    return embedding.Embedding(8, embed_dim=6, name="table")(ids)


class _Images(nn.Module):
  """Flattens images."""

  @nn.compact
  def __call__(self, images, *, deterministic):
    return images.reshape(len(images), -1)


def _model(**fields):
  project = functools.partial(linear.Linear, 4, kernel_axes=("embed", None))
  return image_text.ImageTextModel(
    **{
      "image_encoder": _Images(),
      "text_encoder": _Texts(),
      "text_pooling": image_text.FirstId(_END),
      "image_projection": project(),
      "text_projection": project(use_bias=False),
      "text_keys": ("inputs",),
      **fields,
    }
  )


def _batch(size=4):
  ids = np.arange(size * _LENGTH).reshape(size, _LENGTH) % 5
  ids[np.arange(size), np.arange(size) % 4 + 1] = _END
  return {
    "images": testing.normal(size, 2, 2, 2),
    "inputs": jnp.asarray(ids, jnp.int32),
    "example_weights": testing.array([1.0] * (size - 1) + [0.0]),
  }


def _unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_loss_and_metrics_from_the_definition(kind):
  fields = {}
  if kind == "sigmoid":
    fields = {"contrast": contrastive_losses.sigmoid, "initial_bias": -1.0}
  model, batch = _model(**fields), _batch()
  values = testing.random_values(model, batch)
  params = jax.tree.map(np.float64, values["params"])
  images = np.float64(batch["images"]).reshape(4, -1)
  images = images @ params["image_projection"]["kernel"]
  images = _unit(images + params["image_projection"]["bias"])
  # Each text is the vector of its end, which is the same for all.
  end = params["text_encoder"]["table"]["table"][_END]
  texts = _unit(np.tile(end @ params["text_projection"]["kernel"], (4, 1)))
  logits = np.exp(params["log_scale"]) * images @ texts.T
  logits += params.get("bias", 0.0)
  found = testing.apply(model, values, batch)
  np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
  (total, count), metrics, outputs = testing.apply(
    model, values, batch, method="loss"
  )
  expected = getattr(contrastive_losses, kind)(
    testing.array(logits), batch["example_weights"]
  )
  np.testing.assert_allclose(total, np.sum(expected[:3]), rtol=1e-5)
  assert count == 3
  np.testing.assert_allclose(outputs["image_embeddings"], images, atol=1e-6)
  np.testing.assert_allclose(outputs["row_nll"], expected, rtol=1e-4)
  scale, weight = metrics["logit_scale"]
  np.testing.assert_allclose(scale / weight, np.exp(params["log_scale"]))
  assert ("logit_bias" in metrics) == (kind == "sigmoid")
  # The first image is the nearest of all texts.
  nearest = np.argmax(logits[:3, 0])
  correct, _ = metrics["text_to_image_accuracy"]
  assert correct == 1
  assert (nearest == np.arange(3)).sum() == 1
  assert float(metrics["image_to_text_accuracy"][0]) == 1
  predicted = testing.apply(model, values, batch, method="predict")
  np.testing.assert_array_equal(
    predicted["text_embeddings"], outputs["text_embeddings"]
  )


def test_the_poolings_of_texts():
  x = testing.normal(3, 4, 2)
  ids = jnp.asarray([[1, 5, 2, 5], [9, 1, 1, 1], [1, 1, 7, 5]])
  for pooling, at in (
    (image_text.FirstId(5), (1, 3, 3)),
    (image_text.pool_largest_id, (1, 0, 2)),
    (image_text.pool_last_position, (3, 3, 3)),
  ):
    expected = np.asarray(x)[np.arange(3), np.asarray(at)]
    np.testing.assert_array_equal(pooling(x, ids), expected)


def test_the_scale_is_limited_and_zeros_stay_zeros():
  model, batch = _model(initial_scale=200.0, max_scale=100.0), _batch()
  values = testing.initial_values(model, batch)
  _, metrics, _ = testing.apply(model, values, batch, method="loss")
  np.testing.assert_allclose(
    metrics["logit_scale"][0] / metrics["logit_scale"][1], 100, rtol=1e-5
  )
  plain = _model(image_projection=None, text_projection=None)
  batch = {**batch, "images": jnp.zeros((4, 1, 2, 3))}
  values = testing.random_values(plain, batch)

  def loss(images):
    return plain.apply(
      values, {**batch, "images": images}, method="embed_images"
    ).sum()

  assert np.isfinite(jax.jit(jax.grad(loss))(batch["images"])).all()
  assert loss(batch["images"]) == 0


def test_negatives_are_those_of_all_devices():
  """The loss and gradients of eight devices are those of one."""
  model, batch = _model(), _batch(16)
  values = testing.random_values(model, batch)

  def loss(values, batch):
    return model.apply(values, batch, method="loss")[0][0]

  expected = jax.jit(jax.value_and_grad(loss))(values, batch)
  where = layout.Layout(
    mesh.make_mesh(mesh.MeshSpec.parse("data=2,fsdp=2,tensor=2"))
  )
  shardings = where.shardings(testing.specs(model, batch))
  of_batch = {name: where.batch_sharding(x.ndim) for name, x in batch.items()}
  compiled = where.jit(
    jax.value_and_grad(loss),
    in_shardings=(shardings, of_batch),
    out_shardings=(where.replicated, shardings),
  )
  placed = testing.place((values, batch), (shardings, of_batch))
  lowered = compiled.lower(*placed).compile()
  found = lowered(*placed)
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
    found[1],
    expected[1],
  )
  # Texts are gathered, and each device has the logits of its images only.
  assert "all-gather" in lowered.as_text()
  assert "f32[4,16]" in lowered.as_text()
  assert "f32[16,16]" not in lowered.as_text()


def test_padding_and_other_numbers_of_texts():
  model, batch = _model(), _batch()
  values = testing.random_values(model, batch)
  fn = functools.partial(testing.apply, model, values, method="loss")
  dirty = {**batch, "images": batch["images"].at[3].set(7.0)}
  assert fn(batch)[0] == fn(dirty)[0]
  more = {**batch, "inputs": jnp.tile(batch["inputs"], (3, 1))}
  assert testing.apply(model, values, more).shape == (4, 12)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"initial_scale": 0.0}, r"initial_scale must be positive, got 0"),
    ({"max_scale": -1.0}, r"max_scale must be positive"),
    ({"text_keys": ()}, r"text_keys must have the key of the ids"),
  ],
)
def test_fields_are_checked(fields, message):
  with pytest.raises(ValueError, match=message):
    _model(**fields)


def test_missing_keys_and_wrong_encoders():
  batch = models_testing.packed_batch([[3], [2]], 4)
  with pytest.raises(ValueError, match=r"needs batch\['images'\]"):
    _model().init(jax.random.key(0), batch)
  model = _model(text_pooling=lambda x, ids: x)
  with pytest.raises(ValueError, match=r"text_pooling must return \[batch, em"):
    model.init(jax.random.key(0), _batch())
