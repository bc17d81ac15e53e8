"""Tests for losses that layers add: through stacks, remat and models."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import remat, testing
from paxon.layers.losses import auxiliary_loss
from paxon.layers.stacks import stack

X = testing.normal(2, 3, 4)


class Balanced(nn.Module, auxiliary_loss.Source):
  """Scales its input, and wants the scales to be one."""

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    auxiliary_loss.add(self, "ones", 0.5 * jnp.mean((scale - 1) ** 2))
    auxiliary_loss.add(self, "size", jnp.mean(scale).astype(jnp.bfloat16))
    return x * scale[None, None]


class Model(nn.Module):
  """A stack, whose loss is the sum of what it gives; 11 of weight."""

  stack: nn.Module
  factor: float = 1.0

  def __call__(self, x):
    total, weight = jnp.sum(self.stack(x)), jnp.float32(11)
    added, metrics = auxiliary_loss.collect(
      self, factor=self.factor, weight=weight
    )
    return total + added, metrics


class Paired(nn.Module, auxiliary_loss.Source):
  """A layer with the factors of a product."""

  @nn.compact
  def __call__(self, x):
    left = self.param("left", nn.initializers.uniform(1.0), (3,))
    right = self.param("right", nn.initializers.uniform(1.0), (3,))
    factors = auxiliary_loss.Product(left=left, right=right)
    auxiliary_loss.add(self, "product", factors)
    return x


@pytest.mark.parametrize("scan", [True, False])
def test_products_are_those_of_the_means_of_all_layers(scan):
  layers = stack.Stack((Paired(), Paired()), num_layers=5, scan=scan)
  model = Model(layers, 0.5)
  params = jax.jit(model.init)(jax.random.key(0), X)["params"]
  (loss, metrics), _ = testing.apply(
    model, {"params": params}, X, mutable=[auxiliary_loss.COLLECTION]
  )
  found = params["stack"]
  means = [
    np.concatenate(
      [
        *(found["layers"][f"blocks_{i}"][name] for i in (0, 1)),
        found["layers_4"][name][None],
      ]
    ).mean(0)
    for name in ("left", "right")
  ]
  expected = (means[0] * means[1]).sum()
  np.testing.assert_allclose(loss, np.sum(X) + 0.5 * 11 * expected, rtol=1e-5)
  value, weight = metrics["auxiliary_loss/product"]
  np.testing.assert_allclose(value / weight, expected, rtol=1e-6)


def _model(factor=1.0, **stack_fields):
  layers = stack.Stack((Balanced(), Balanced()), num_layers=5, **stack_fields)
  return Model(layers, factor)


def _loss(model):
  def fn(values):
    return model.apply(values, X, mutable=[auxiliary_loss.COLLECTION])[0]

  return jax.jit(jax.value_and_grad(fn, has_aux=True))


def _scales(tree):
  layers = tree["params"]["stack"]
  stacked = [layers["layers"][f"blocks_{i}"]["scale"] for i in (0, 1)]
  return np.concatenate([*stacked, layers["layers_4"]["scale"][None]])


@pytest.mark.parametrize(
  "fields",
  [{}, {"scan": False, "remat_policy": remat.save_nothing}],
  ids=["scanned", "unrolled, remat"],
)
def test_the_loss_and_its_gradient_have_those_of_all_layers(fields):
  with_them, without = _model(**fields), _model(factor=0.0)
  values = testing.random_values(with_them, X)
  (loss, metrics), gradient = _loss(with_them)(values)
  (plain, told), plain_gradient = _loss(without)(values)
  scales = _scales(values)
  ones = 0.5 * np.sum(np.mean((scales - 1) ** 2, axis=1))
  size = np.sum(np.mean(scales, axis=1))
  np.testing.assert_allclose(
    metrics["auxiliary_loss/ones"], (ones * 11, 11), rtol=1e-5
  )
  np.testing.assert_allclose(
    metrics["auxiliary_loss/size"], (size * 11, 11), rtol=1e-2
  )
  assert metrics["auxiliary_loss/size"][0].dtype == jnp.float32
  assert set(told) == set(metrics)
  added = sum(value for value, _ in metrics.values())
  np.testing.assert_allclose(loss - plain, added, rtol=1e-4)
  np.testing.assert_allclose(
    _scales(gradient) - _scales(plain_gradient),
    11 * ((scales - 1) / 4 + 1 / 4),
    rtol=2e-2,
    atol=1e-2,
  )


def test_a_loss_without_mutable_collection_is_rejected():
  values = testing.random_values(_model(), X)
  with pytest.raises(
    ValueError, match=r"Balanced adds an auxiliary loss; .*auxiliary_losses"
  ):
    _model().apply(values, X)
  # Where none is wanted, nothing is collected.
  assert _model(factor=0.0).apply(values, X)[1] == {}


def test_they_are_no_variables_of_the_model():
  specs = testing.specs(_model(), X)
  assert set(specs) == {"params"}


class Silent(nn.Module):
  """Adds a loss without saying that it does."""

  def __call__(self, x):
    auxiliary_loss.add(self, "x", jnp.sum(x))
    return x


class Wide(nn.Module, auxiliary_loss.Source):
  """Adds one loss for each feature."""

  def __call__(self, x):
    auxiliary_loss.add(self, "x", x)
    return x


def test_rejects_what_cannot_be_added():
  x = jnp.ones(3)
  with pytest.raises(TypeError, match=r"Silent .* subclass of auxiliary_loss"):
    Silent().apply({}, x)
  with pytest.raises(ValueError, match=r"'x' of Wide must be a scalar, .*3"):
    Wide().apply({}, x)
