"""Models that are no decoder train as steps do, and generate where they can."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.inputs import synthetic_lm_input
from paxon.layers.decoding import samplers
from paxon.layers.models import (
  document_scores,
  random_masking,
  vector_autoencoder,
)
from paxon.layers.models import testing as models_testing
from paxon.layers.quantizers import scalar
from paxon.layers.vision import autoencoder, discriminator
from paxon.learners import learner, schedules, train_state, train_step
from paxon.learners.optimizers import adamw, optimizer_by_path, sgd
from paxon.runner import user_error
from paxon.runner.generation import samples
from paxon.runner.session import model_loss
from paxon.runner.session import session as session_lib
from paxon.runner.settings import generation
from paxon.runner.training import testing
from paxon.sharding import initialization, variables

_PAIRS = models_testing.paired_batch(
  [[(3, 4), (2, 2)], [(5, 6)], [(6, 7)]], source=6, length=7
)
_TEXTS = models_testing.packed_batch([[7], [6], [5, 2]], 7)
_MASKING = random_masking.RandomMasking(
  mask_id=3, vocab_size=models_testing.VOCAB, rate=0.4
)
_CLASSES = {
  **models_testing.packed_batch([[7], [4], [5]], 7),
  "labels": jnp.asarray([4, 0, 2], jnp.int32),
  "example_weights": jnp.ones(3),
}


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("model", "batch", "metric_fns"),
  [
    pytest.param(
      models_testing.tiny_t5(),
      _PAIRS,
      (document_scores.strict_accuracy, document_scores.predictions_per_row),
      id="encoder-decoder",
    ),
    pytest.param(
      models_testing.tiny_bert(masking=_MASKING),
      _TEXTS,
      (document_scores.strict_accuracy,),
      id="masked",
    ),
    pytest.param(models_testing.tiny_classifier(), _CLASSES, (), id="classes"),
  ],
)
def test_a_step_learns(model, batch, metric_fns):
  specs = variables.get_specs(model_loss.abstract_variables(model, batch))
  optimizer = adamw.AdamW(schedule=schedules.Constant(value=0.03))
  how = learner.Learner(optimizer=optimizer, max_grad_norm=1.0)
  values = initialization.initial_values(specs, 0)
  state = train_state.make_initial(values, learner=how, specs=specs)
  step = jax.jit(
    train_step.make_train_step(
      model_loss.make_loss_fn(model, specs=specs, deterministic=False),
      learner=how,
      specs=specs,
      seed=0,
      metric_fns=metric_fns,
    )
  )
  losses = []
  for _ in range(40):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
  assert np.all(np.isfinite(losses))
  assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:5])
  if metric_fns:
    assert 0 <= metrics["strict_accuracy"][0] <= metrics["strict_accuracy"][1]
  evaluate = jax.jit(
    train_step.make_eval_step(
      model_loss.make_loss_fn(model, specs=specs, deterministic=True),
      metric_fns=metric_fns,
    )
  )
  first, again = (evaluate(state.variables, batch)["loss"] for _ in range(2))
  assert float(first[0]) == float(again[0])


def _rule(name, pattern, rate):
  optimizer = sgd.Sgd(schedule=schedules.Constant(value=rate))
  return optimizer_by_path.PathRule(
    name=name, pattern=pattern, optimizer=optimizer
  )


@pytest.mark.nightly
def test_one_step_trains_a_generator_and_its_discriminator():
  fields = {"filters": 4, "multipliers": (1, 1), "time_strides": (1,)}
  fields |= {"num_blocks": 1, "num_groups": 2}
  network = discriminator.Discriminator(filters=2, multipliers=(1,))
  model = vector_autoencoder.VectorAutoencoder(
    autoencoder.Encoder(output_dim=2, **fields),
    scalar.FiniteScalarQuantizer((4, 3)),
    autoencoder.Decoder(output_dim=1, **fields),
    reconstruction_weight=5.0,
    adversary=discriminator.AdversarialLoss(network),
  )
  images = np.random.default_rng(0).standard_normal((4, 4, 4, 1))
  weights = np.float32([1, 0, 1, 1])
  batch = {"images": np.float32(images), "example_weights": weights}
  batch = jax.device_put(batch)
  specs = variables.get_specs(model_loss.abstract_variables(model, batch))
  rates = {"discriminator": 0.2, "generator": 0.1}
  rules = (
    _rule("discriminator", "params/adversary/.*", rates["discriminator"]),
    _rule("generator", ".*", rates["generator"]),
  )
  how = learner.Learner(
    optimizer=optimizer_by_path.OptimizerByPath(rules=rules)
  )
  values = initialization.initial_values(specs, 0)
  state = train_state.make_initial(values, learner=how, specs=specs)
  step = train_step.make_train_step(
    model_loss.make_loss_fn(model, specs=specs, deterministic=False),
    learner=how,
    specs=specs,
    seed=0,
  )
  after, metrics = jax.jit(step)(state, batch)
  params = values["params"]
  judge = params["adversary"]["discriminator"]

  def mean(x):
    return jnp.sum(jnp.asarray(weights) * x) / 3

  def fake(params):
    return model.apply({"params": params}, batch)

  def logits(params, x):
    return network.apply({"params": params}, x)

  def generator(params):
    made = fake(params)
    errors = jnp.mean((made - batch["images"]) ** 2, axis=(1, 2, 3))
    fooled = jax.nn.softplus(-logits(judge, made))
    return 5 * mean(errors) + 0.1 * mean(fooled)

  def discriminating(judge):
    real, made = logits(judge, batch["images"]), logits(judge, fake(params))
    lecam = jnp.maximum(real, 0) ** 2 + jnp.maximum(-made, 0) ** 2
    judged = jax.nn.softplus(-real) + jax.nn.softplus(made)
    return mean(judged + 0.001 * lecam)

  losses = jax.jit(jax.value_and_grad(generator))(params)
  judged = jax.jit(jax.value_and_grad(discriminating))(judge)
  loss = metrics["loss"][0] / metrics["loss"][1]
  np.testing.assert_allclose(loss, losses[0] + judged[0], rtol=1e-5)
  expected = jax.tree.map(lambda g: -rates["generator"] * g, losses[1])
  expected["adversary"]["discriminator"] = jax.tree.map(
    lambda g: -rates["discriminator"] * g, judged[1]
  )
  moved = jax.tree.map(lambda a, b: a - b, after.variables["params"], params)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
    moved,
    expected,
  )
  averages = after.variables["batch_stats"]["adversary"]
  real = mean(logits(judge, batch["images"]))
  np.testing.assert_allclose(averages["mean_real"], 0.001 * real, rtol=1e-4)


class Letters:
  """A tokenizer of the letters a to m; 1 begins a text and 2 ends it."""

  vocab_size = models_testing.VOCAB
  pad_id, begin_id, end_id = 0, 1, 2

  def encode(self, text):
    return np.asarray([ord(c) - ord("a") + 3 for c in str(text)], np.int32)

  def decode(self, ids):
    return "".join(chr(i + ord("a") - 3) for i in np.asarray(ids) if i > 2)

  def byte_counts(self, ids):
    return (np.asarray(ids) > 2).astype(np.int32)


class Pairs(synthetic_lm_input.SyntheticLmInput):
  """Random texts, each with another one as its source."""

  def get_next(self):
    batch, source = super().get_next(), super().get_next()
    names = ("inputs", "positions", "segment_ids")
    return batch | {f"encoder_{name}": source[name] for name in names}


def _session(model):
  """A job with this model, on eight devices."""
  job, _ = testing.make(mesh="data=4,fsdp=2")
  task = dataclasses.replace(
    job.task, model=model, tokenizer=Letters(), metrics=()
  )
  settings = generation.GenerationSettings(
    prompts=("abc", "m"), max_new_tokens=3, sampler=samplers.Greedy()
  )
  source = Pairs(
    global_batch_size=8, length=6, vocab_size=task.tokenizer.vocab_size
  )
  job = dataclasses.replace(
    job,
    task=task,
    train_input=source,
    eval_inputs={},
    eval_every_steps=None,
    generation=settings if task.generates else None,
  )
  return session_lib.open_session(job)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("scale", [2.5, None], ids=["guided", "plain"])
def test_an_encoder_decoder_reads_the_prompts_and_writes_texts(scale):
  """A negative prompt is another source, longer than the prompts."""
  model = models_testing.tiny_transformer()
  session = _session(model)
  negative = "mlkji"
  if scale is not None:
    method = generation.NegativePrompt(scale=scale, prompt=negative)
    settings = session.job.generation
    assert settings is not None
    settings = dataclasses.replace(
      settings,
      method=method,
      num_samples=2,
      sampler=lambda logits, key: jnp.argmax(logits, axis=-1).astype(jnp.int32),
    )
    job = dataclasses.replace(session.job, generation=settings)
    session = dataclasses.replace(session, job=job)
  state = session.initial_state()
  drawn = samples.draw(session, state)
  # Both texts by whole forward passes, of one padded width.
  values = jax.device_get(state.variables)
  at = jnp.arange(6)[None].astype(jnp.int32)
  forward = jax.jit(model.apply)

  def logits(source, text):
    source = [*Letters().encode(source).tolist(), 2]
    inside = (at < len(source)).astype(jnp.int32)
    source = jnp.asarray([source + [0] * (6 - len(source))], jnp.int32)
    found = forward(values, text, at, jnp.ones_like(at), source, at, inside)
    return np.asarray(found[0], np.float64)

  count = len(drawn) // 2
  for number, prompt in enumerate(("abc", "m")):
    text, ids = jnp.zeros((1, 6), jnp.int32).at[0, 0].set(1), []
    while len(ids) < 3 and Letters.end_id not in ids:
      found = logits(prompt, text)[len(ids)]
      if scale is not None:
        without = logits(negative, text)[len(ids)]
        found = without + scale * (found - without)
      ids.append(int(np.argmax(found)))
      text = text.at[0, len(ids)].set(ids[-1])
    for sample in drawn[number * count : (number + 1) * count]:
      assert sample.prompt == prompt
      assert sample.ids == tuple(ids)
      assert sample.continuation == Letters().decode(ids)


def test_a_masked_model_cannot_generate():
  session = _session(models_testing.tiny_bert())
  state = session.abstract_state()
  with pytest.raises(
    user_error.UserError,
    match=r"TinyLm cannot generate text: its model, MaskedLm, has no prefill\.",
  ):
    samples.draw(session, state, prompts=["a"])
