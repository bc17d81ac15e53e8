"""Tests for distillation: the loss by its definition, what is trained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, linear, token_context
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
  return initialization.initial_values(variables.get_specs(made), 0)


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
      jax.jit(
        jax.grad(
          lambda *x: distilled_lm.forward_kl(*x, temperature=temperature).sum(),
          argnums=(0, 1),
        )
      )(jnp.asarray(teacher), jnp.asarray(student)),
    )
  np.testing.assert_allclose(found, expected, rtol=1e-12)
  assert not gradients[0].any()
  np.testing.assert_allclose(
    gradients[1], (np.exp(q) - np.exp(p)) / temperature, rtol=1e-9, atol=1e-12
  )


@pytest.mark.parametrize("top", [1, 3, 5])
def test_kl_of_the_most_likely_tokens(top):
  random = np.random.RandomState(1)
  teacher, student = 3 * random.standard_normal((2, 2, 3, 5))
  p, q = (_log_softmax(x / 1.7) for x in (teacher, student))
  ids = np.argsort(-p, axis=-1)[..., :top]
  is_top = np.zeros(p.shape, bool)
  np.put_along_axis(is_top, ids, True, axis=-1)
  terms = np.where(is_top, np.exp(p) * (p - q), 0).sum(axis=-1)
  rest, own = (np.where(is_top, 0, np.exp(x)).sum(axis=-1) for x in (p, q))
  if top < 5:
    terms += rest * (np.log(rest) - np.log(own))
  given = np.take_along_axis(p, ids, axis=-1)

  @jax.jit
  def kl(x):
    return distilled_lm.top_kl(
      jnp.asarray(ids, jnp.int32), jnp.asarray(given), x, temperature=1.7
    )

  with jax.enable_x64(True):
    found = kl(jnp.asarray(student))
    gradient = jax.jit(jax.grad(lambda x: kl(x).sum()))(jnp.asarray(student))
  np.testing.assert_allclose(found, terms, rtol=1e-10)
  # The gradient of the definition: outside of the top the mass is shared in the
  # student's proportions.
  target = np.exp(p)
  if top < 5:
    target = np.where(is_top, target, np.exp(q) * (rest / own)[..., None])
  expected = (np.exp(q) - target) / 1.7
  np.testing.assert_allclose(gradient, expected, rtol=1e-8, atol=1e-10)


def test_no_gradient_is_lost_where_the_rest_is_zero():
  logits = jnp.array([[[30.0, -40.0, -50.0]]])
  ids, log_probs = jnp.zeros((1, 1, 1), jnp.int32), jnp.zeros((1, 1, 1))
  value, gradient = jax.jit(
    jax.value_and_grad(lambda x: distilled_lm.top_kl(ids, log_probs, x).sum())
  )(logits)
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()


def test_hidden_states_are_compared_as_defined():
  projection = linear.Linear(
    output_dim=models_testing.EMBED,
    use_bias=False,
    kernel_axes=("embed", None),
  )
  model = _model(
    temperature=2.0,
    teacher_share=0.3,
    hidden_weight=0.5,
    hidden_projection=projection,
  )
  plain = model.clone(hidden_weight=0.0, hidden_projection=None)
  values = _values(model)
  kernel = np.asarray(values["params"]["hidden_projection"]["kernel"])
  context = token_context.TokenContext.from_batch(_BATCH)

  @jax.jit
  def read(values):
    states = [
      m.apply({"params": p}, _BATCH["inputs"], context, method="hidden")
      for m, p in (
        (models_testing.tiny_decoder(), values["frozen"]["teacher"]),
        (models_testing.tiny_decoder(num_layers=1), values["params"]),
      )
    ]
    results = [
      m.apply(values, _BATCH, deterministic=False, method="loss")
      for m in (model, plain)
    ]
    return states, results

  (taught, x), results = read(values)
  error = np.asarray(x, np.float64) @ kernel - np.asarray(taught)
  weights = np.asarray(_BATCH["weights"], np.float64)
  expected = (np.square(error).mean(axis=-1) * weights).sum()
  (with_hidden, metrics, _), (without, _, _) = results
  np.testing.assert_allclose(metrics["hidden_error"][0], expected, rtol=1e-5)
  np.testing.assert_allclose(
    with_hidden[0] - without[0], 0.5 * expected, rtol=1e-4
  )


def test_training_reads_the_prefix_as_evaluation_does():
  model = _model()
  values = _values(model)
  prefix = _BATCH["positions"] < 2

  @jax.jit
  def measure(values, batch):
    apply = functools.partial(model.apply, values, method="loss")
    return [
      apply(batch, deterministic=each)[1]["log_pplx"][0]
      for each in (False, True)
    ]

  trained, evaluated = measure(values, {**_BATCH, "prefix": prefix})
  np.testing.assert_allclose(trained, evaluated, rtol=1e-6)
  assert abs(trained - measure(values, _BATCH)[0]) > 1e-4


@pytest.mark.nightly
def test_a_teacher_of_batches_is_that_of_memory():
  model = _model(temperature=2.0)
  values = _values(model)
  alone = model.clone(teacher=None)
  arrays = [_BATCH[k] for k in ("inputs", "positions", "segment_ids")]

  @jax.jit
  def losses(values):
    logits = models_testing.tiny_decoder().apply(
      {"params": values["frozen"]["teacher"]}, *arrays
    )
    log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(logits / 2.0), 16)
    batch = {
      **_BATCH,
      distilled_lm.IDS: ids,
      distilled_lm.LOG_PROBS: log_probs,
    }
    params = {"params": values["params"]}
    return (
      model.apply(values, _BATCH, deterministic=False, method="loss")[0][0],
      alone.apply(params, batch, deterministic=False, method="loss")[0][0],
    )

  in_memory, of_batches = losses(values)
  np.testing.assert_allclose(of_batches, in_memory, rtol=1e-5)
  with pytest.raises(ValueError, match=r"no teacher, and the batch no"):
    alone.apply(
      {"params": values["params"]}, _BATCH, deterministic=False, method="loss"
    )
  with pytest.raises(ValueError, match="hidden_weight requires a teacher"):
    model.clone(teacher=None, hidden_weight=1.0)


def test_the_loss_is_that_of_the_definition():
  model = _model(temperature=2.0, teacher_share=0.3)
  values = _values(model)
  arrays = [_BATCH[k] for k in ("inputs", "positions", "segment_ids")]
  z = [
    np.asarray(jax.jit(m.apply)({"params": p}, *arrays), np.float64)
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

  value, gradients = jax.jit(jax.value_and_grad(loss))(values)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  assert not any(g.any() for g in jax.tree.leaves(gradients["frozen"]))
  assert all(g.any() for g in jax.tree.leaves(gradients["params"]))


def test_evaluation_is_that_of_the_student():
  model = _model()
  values = _values(model)
  alone = models_testing.tiny_decoder(num_layers=1)
  one, other = (
    jax.jit(functools.partial(each.apply, method="loss"))(own, _BATCH)
    for each, own in ((model, values), (alone, {"params": values["params"]}))
  )
  assert one[0] == other[0]


def test_rejects_another_vocabulary():
  other = models_testing.tiny_decoder().clone(
    embedding=embedding.Embedding(24, embed_dim=models_testing.EMBED)
  )
  model = _model().clone(teacher=fixed_model.FixedModel(model=other))
  with pytest.raises(ValueError, match="predicts 24 ids and the student 16"):
    _values(model)
