"""Tests for linen models as loss functions."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.session import model_loss
from paxon.sharding import variables


class _Model(nn.Module):
  """Dropout, a running mean and one kernel."""

  @nn.compact
  def loss(self, batch, *, deterministic=True):
    x = batch["x"]
    mean = self.variable("stats", "mean", lambda: jnp.zeros(()))
    if not deterministic:
      mean.value = 0.5 * mean.value + 0.5 * jnp.mean(x)
    y = nn.Dense(3, use_bias=False)(x)
    y = nn.Dropout(0.5)(y, deterministic=deterministic)
    return (jnp.sum(y), jnp.float32(y.shape[0])), {}, {"y": y}


BATCH = {"x": jnp.ones((2, 4))}
SPECS = variables.get_specs(model_loss.abstract_variables(_Model(), BATCH))


def _values():
  return variables.unbox(model_loss.init(_Model(), BATCH))


def _loss(deterministic):
  return model_loss.make_loss_fn(
    _Model(), specs=SPECS, deterministic=deterministic
  )


def test_training_replaces_statistics_and_uses_random_keys():
  rngs = {"dropout": jax.random.key(0)}
  result = _loss(deterministic=False)(_values(), BATCH, rngs)
  assert result.new_collections == {"stats": {"mean": 0.5}}
  kept = np.asarray(result.outputs["y"]) != 0
  assert 0 < kept.sum() < kept.size


def test_evaluation_is_deterministic_and_changes_nothing():
  result = _loss(deterministic=True)(_values(), BATCH, {})
  assert not result.new_collections
  kernel = _values()["params"]["Dense_0"]["kernel"]
  np.testing.assert_allclose(result.outputs["y"], BATCH["x"] @ kernel)
  np.testing.assert_allclose(result.loss[0], 2 * kernel.sum(), rtol=1e-6)


def test_a_collection_must_have_one_rule():
  def spec(name, update):
    return variables.VariableSpec(
      name=name,
      shape=(),
      dtype=jnp.dtype(jnp.float32),
      axes=(),
      update=update,
    )

  mixed = {
    "state": {
      "a": spec("state/a", variables.UpdateRule.REPLACE),
      "b": spec("state/b", variables.UpdateRule.OPTIMIZER),
    }
  }
  with pytest.raises(
    ValueError, match=r"'state' holds state/a, which .* and state/b, which it"
  ):
    model_loss.replaced_collections(mixed)


class _Two(nn.Module):
  """Two parts, which may be one object."""

  first: nn.Module
  second: nn.Module

  def loss(self, batch, *, deterministic=True):
    del deterministic
    y = self.second(self.first(batch["x"]))
    return (jnp.sum(y), jnp.float32(y.shape[0])), {}, {"y": y}


def test_one_module_used_twice_is_an_error():
  part = nn.Dense(4)
  with pytest.raises(
    user_error.UserError, match=r"One Dense object is in two .*first and second"
  ):
    model_loss.abstract_variables(_Two(part, part), BATCH)
  two = model_loss.abstract_variables(_Two(nn.Dense(4), nn.Dense(4)), BATCH)
  assert set(two["params"]) == {"first", "second"}
