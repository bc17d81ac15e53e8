"""Tests for distillation: the loss by its definition, what is trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding
from paxon.layers.models import distilled_lm, fixed_model
from paxon.layers.models import testing as models_testing
from paxon.sharding import initialization, variables

_BATCH = models_testing.packed_batch([[5, 2], [4]], 7)


def _model(**fields):
  return distilled_lm.DistilledLm(
    student=models_testing.tiny_decoder(num_layers=1),
    teacher=fixed_model.FixedModel(model=models_testing.tiny_decoder()),
    **fields,
  )


def _values(model):
  made = jax.eval_shape(
    lambda batch: model.init(jax.random.key(0), batch, method="loss"), _BATCH
  )
  return initialization.initial_values(variables.specs_of(made), 0)


def _log_softmax(x):
  x = x - x.max(axis=-1, keepdims=True)
  return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_kl_and_its_gradient(temperature):
  random = np.random.RandomState(0)
  teacher, student = 3 * random.standard_normal((2, 2, 3, 5))
  p, q = (_log_softmax(x / temperature) for x in (teacher, student))
  expected = (np.exp(p) * (p - q)).sum(axis=-1)
  with jax.enable_x64(True):
    found, gradients = (
      distilled_lm.forward_kl(
        jnp.asarray(teacher), jnp.asarray(student), temperature=temperature
      ),
      jax.grad(
        lambda *x: distilled_lm.forward_kl(*x, temperature=temperature).sum(),
        argnums=(0, 1),
      )(jnp.asarray(teacher), jnp.asarray(student)),
    )
  np.testing.assert_allclose(found, expected, rtol=1e-12)
  assert not gradients[0].any()
  np.testing.assert_allclose(
    gradients[1], (np.exp(q) - np.exp(p)) / temperature, rtol=1e-9, atol=1e-12
  )


def test_the_loss_is_that_of_the_definition():
  model = _model(temperature=2.0, teacher_share=0.3)
  values = _values(model)
  arrays = [_BATCH[k] for k in ("inputs", "positions", "segment_ids")]
  z = [
    np.asarray(m.apply({"params": p}, *arrays), np.float64)
    for m, p in (
      (models_testing.tiny_decoder(), values["frozen"]["teacher"]),
      (models_testing.tiny_decoder(num_layers=1), values["params"]),
    )
  ]
  p, q = (_log_softmax(x / 2.0) for x in z)
  kl = (np.exp(p) * (p - q)).sum(axis=-1)
  targets = np.asarray(_BATCH["targets"])[:, :, None]
  nll = -np.take_along_axis(_log_softmax(z[1]), targets, axis=2)[:, :, 0]
  weights = np.asarray(_BATCH["weights"], np.float64)
  expected = ((0.3 * 4 * kl + 0.7 * nll) * weights).sum()

  def loss(values):
    result = model.apply(values, _BATCH, deterministic=False, method="loss")
    return result[0][0]

  value, gradients = jax.value_and_grad(loss)(values)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  assert not any(g.any() for g in jax.tree.leaves(gradients["frozen"]))
  assert all(g.any() for g in jax.tree.leaves(gradients["params"]))


def test_evaluation_is_that_of_the_student():
  model = _model()
  values = _values(model)
  alone = models_testing.tiny_decoder(num_layers=1)
  one = model.apply(values, _BATCH, method="loss")
  other = alone.apply({"params": values["params"]}, _BATCH, method="loss")
  assert one[0] == other[0]


def test_rejects_another_vocabulary():
  other = models_testing.tiny_decoder().clone(
    embedding=embedding.Embedding(24, embed_dim=models_testing.EMBED)
  )
  model = _model().clone(teacher=fixed_model.FixedModel(model=other))
  with pytest.raises(ValueError, match="predicts 24 ids and the student 16"):
    _values(model)
