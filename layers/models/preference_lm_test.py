"""Tests for the model of preferences: log probabilities, TRL, fixed models."""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.layers import linear
from paxon.layers.losses import preference_losses, softmax_loss
from paxon.layers.models import (
  desirability_lm,
  fixed_model,
  make_preference_trajectory,
  preference_lm,
  reward_lm,
)
from paxon.layers.models import testing as models_testing
from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.sharding import initialization, variables

_GOLDENS = (
  pathlib.Path(__file__).parent / "testdata" / "preference_trajectory.json"
)


def _imported(config):
  """Returns the parameters of a model of `golden_case.weight`, nested."""
  names = families.find(config).names(config)

  def read_rows(name, start, stop):
    shape = names.tensors[name].shape
    return golden_case.weight(name, shape)[start:stop]

  tree = {}
  for name, leaf in names.leaves.items():
    place = tree
    *folders, last = name.split("/")
    for folder in folders:
      place = place.setdefault(folder, {})
    place[last] = jnp.asarray(leaf.from_tensors(read_rows))
  return tree["params"]


def _batch(pairs, length, keys=("chosen_ids", "rejected_ids")):
  """Returns the batch of pairs of ids, one after the other."""
  names = ("inputs", "targets", "is_token", "weights")
  arrays = {name: np.zeros((len(pairs), 2 * length)) for name in names}
  for i, pair in enumerate(pairs):
    for j, key in enumerate(keys):
      prompt = pair["prompt_ids"]
      ids = [*prompt, *pair[key]]
      n = len(ids) - 1
      where = i, slice(j * length, j * length + n)
      arrays["inputs"][where] = ids[:-1]
      arrays["targets"][where] = ids[1:]
      arrays["is_token"][where] = 1
      arrays["weights"][where] = np.arange(1, n + 1) >= len(prompt)
  dtypes = {"weights": jnp.float32}
  return {
    k: jnp.asarray(v, dtypes.get(k, jnp.int32)) for k, v in arrays.items()
  }


def _loss(model, values, batch):
  run = jax.jit(functools.partial(model.apply, method="loss"))
  result: Any = run(values, batch)
  return result


def _trajectory(loss):
  """Returns the losses of the steps of `make_preference_trajectory`."""
  made = make_preference_trajectory
  family = families.find(made.CONFIG)
  is_labelled = loss == "kto"
  params = _imported(made.CONFIG)
  frozen = {"reference": params}
  if loss == made.REWARD:
    model = reward_lm.RewardLm(
      decoder=family.model(made.CONFIG),
      reward_head=linear.Linear(output_dim=1, use_bias=False),
      center=made.CENTER,
    )
    kernel = golden_case.weight("score.weight", (1, 16)).T
    params = {**params, "reward_head": {"kernel": jnp.asarray(kernel)}}
  else:
    kind = preference_lm.PreferenceLm
    if is_labelled:
      kind = desirability_lm.DesirabilityLm
    model = kind(
      policy=family.model(made.CONFIG),
      reference=fixed_model.FixedModel(model=family.model(made.CONFIG)),
      preference=functools.partial(
        getattr(preference_losses, loss), beta=made.BETA
      ),
    )
  optimizer = optax.adamw(made.LEARNING_RATE, b2=0.95, weight_decay=0.0)

  @jax.jit
  def step(params, state, batch):
    def objective(params):
      values = {"params": params, "frozen": frozen}
      (total, weight), _, _ = _loss(model, values, batch)
      return total / weight

    value, gradient = jax.value_and_grad(objective)(params)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value

  state, losses = optimizer.init(params), []
  for i in range(made.STEPS):
    rows = slice(i * made.BATCH, (i + 1) * made.BATCH)
    if is_labelled:
      answers = made.answers()[rows]
      keys = ("completion_ids", "KL_completion_ids")
      batch = _batch(answers, made.LENGTH, keys)
      labels = np.asarray([[each["label"]] for each in answers], np.int32)
      batch["is_desirable"] = jnp.broadcast_to(labels, batch["inputs"].shape)
    else:
      batch = _batch(made.pairs()[rows], made.LENGTH)
    # Optax promotes.
    with jax.numpy_dtype_promotion("standard"):
      params, state, value = step(params, state, batch)
    losses.append(float(value))
  return losses


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "reward"])
def test_twenty_steps_of_trl(loss):
  expected = json.loads(_GOLDENS.read_text())[loss]
  np.testing.assert_allclose(_trajectory(loss), expected, rtol=1e-4)


def _pair_batch():
  random = np.random.RandomState(0)
  pairs = [
    {
      "prompt_ids": random.randint(0, models_testing.VOCAB, 2).tolist(),
      "chosen_ids": random.randint(0, models_testing.VOCAB, n).tolist(),
      "rejected_ids": random.randint(0, models_testing.VOCAB, m).tolist(),
    }
    for n, m in ((4, 2), (1, 5))
  ]
  return _batch(pairs, 6)


def _model_and_values(**fields):
  model = preference_lm.PreferenceLm(
    policy=models_testing.tiny_decoder(**fields),
    reference=fixed_model.FixedModel(model=models_testing.tiny_decoder()),
  )
  made = jax.eval_shape(
    lambda batch: model.init(jax.random.key(0), batch, method="loss"),
    _pair_batch(),
  )
  specs = variables.get_specs(made)
  return model, initialization.initial_values(specs, 0), specs


def test_only_the_policy_is_trained():
  model, values, specs = _model_and_values()
  alone = models_testing.tiny_decoder()
  own = jax.eval_shape(
    lambda ids: alone.init(jax.random.key(0), ids), jnp.zeros((1, 4), jnp.int32)
  )
  assert jax.tree.structure(values["params"]) == jax.tree.structure(
    variables.unbox(own["params"])
  )
  for spec in jax.tree.leaves(specs):
    assert spec.trainable == spec.name.startswith("params/")
  batch = _pair_batch()
  gradients = jax.jit(
    jax.grad(lambda values: model.apply(values, batch, method="loss")[0][0])
  )(values)
  assert all(not g.any() for g in jax.tree.leaves(gradients["frozen"]))
  assert all(g.any() for g in jax.tree.leaves(gradients["params"]))


def test_log_probabilities_of_answers():
  model, values, _ = _model_and_values()
  batch = _pair_batch()
  apply = jax.jit(models_testing.tiny_decoder().apply)
  _, _, outputs = _loss(model, values, batch)
  sums = []
  for params in (values["params"], values["frozen"]["reference"]):
    logits = [
      apply({"params": params}, batch["inputs"][:, half])
      for half in (slice(0, 6), slice(6, 12))
    ]
    log_probs = jax.nn.log_softmax(jnp.concatenate(logits, axis=1))
    targets = batch["targets"][:, :, None]
    found = jnp.take_along_axis(log_probs, targets, axis=2)[:, :, 0]
    found *= batch["weights"]
    sums.append([found[:, :6].sum(1), found[:, 6:].sum(1)])
  (chosen, rejected), (fixed_chosen, fixed_rejected) = sums
  margin = 0.1 * ((chosen - fixed_chosen) - (rejected - fixed_rejected))
  np.testing.assert_allclose(outputs["pair_margin"], margin, rtol=2e-4)
  expected = np.log1p(np.exp(-np.asarray(margin, np.float64)))
  np.testing.assert_allclose(outputs["pair_loss"], expected, rtol=1e-5)


def test_pairs_without_an_answer_do_not_count():
  model, values, _ = _model_and_values()
  batch = _pair_batch()
  whole = _loss(model, values, batch)
  batch["weights"] = batch["weights"].at[1, 6:].set(0)
  (total, count), metrics, _ = _loss(model, values, batch)
  assert count == 1
  np.testing.assert_allclose(total, whole[2]["pair_loss"][0], rtol=1e-6)
  assert metrics["preference_accuracy"][1] == 1


@pytest.mark.nightly
def test_chunks_of_the_loss_change_nothing():
  model, values, _ = _model_and_values()
  policy = model.policy.clone(
    token_loss=softmax_loss.SoftmaxLoss(chunk_length=4)
  )
  chunked = model.clone(policy=policy)

  def value(model):
    return lambda params: model.apply(
      {**values, "params": params}, _pair_batch(), method="loss"
    )[0][0]

  one, other = (
    jax.jit(jax.value_and_grad(value(m)))(values["params"])
    for m in (model, chunked)
  )
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_text_is_scored_by_the_policy():
  model, values, _ = _model_and_values()
  batch = models_testing.packed_batch([[5, 2], [4]], 7)
  alone = models_testing.tiny_decoder()
  own = {"params": values["params"]}
  one = _loss(model, values, batch)
  other = _loss(alone, own, batch)
  assert one[0] == other[0]
