"""Tests of adapters against PEFT: 20 steps, and folders in both directions."""

import json

from etils import epath
import fiddle as fdl
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.models.hugging_face import (
  families,
  golden_case,
  safetensors_file,
)
from paxon.learners import (
  adamw,
  learner,
  schedules,
  train_state,
  train_step,
  variable_groups,
)
from paxon.quantization import lora
from paxon.runner.configuration import rewrites
from paxon.sharding import variables
from paxon.tools import peft_adapter
from paxon.tools.hf_goldens import make_adapter_goldens as goldens

GOLDEN = golden_case.read(goldens.CASE)
FAMILY = families.find(GOLDEN.config)
NAMES = FAMILY.names(GOLDEN.config)


def _folder(kind):
  return epath.Path(goldens.FOLDER) / f"peft_{kind}"


def _results(kind):
  return json.loads((_folder(kind) / "results.json").read_text())


def _kernels():
  def read_rows(name, start, stop):
    shape = NAMES.tensors[name].shape
    return golden_case.weight(name, shape)[start:stop]

  return {
    name: np.asarray(leaf.from_tensors(read_rows))
    for name, leaf in NAMES.leaves.items()
  }


def _model(adapter, matmuls):
  config = FAMILY.model(GOLDEN.config, fdl.Config)
  targets = ("attention_projections", "feed_forward")
  rules = (lora.LoraRule(targets, adapter, matmuls),)
  patterns = rewrites.adapt(config, rules)
  return fdl.build(config), patterns


def _arguments(ids):
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  return jnp.asarray(ids), positions, jnp.ones_like(jnp.asarray(ids))


def _loss_fn(model, ids):
  def loss_fn(values, batch, rngs):
    del batch, rngs
    logits = model.apply(values, *_arguments(ids))
    logs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    at = jnp.asarray(ids[:, 1:])[..., None]
    nll = -jnp.take_along_axis(logs, at, axis=-1)
    loss = jnp.sum(nll), jnp.float32(nll.size)
    return train_step.LossOutput(loss, {}, {}, {})

  return loss_fn


def _initial(specs, adapter):
  """Returns the values with which the goldens begin."""
  given = _kernels()
  for name, spec in _flat(specs).items():
    if name in given:
      continue
    value = np.zeros(spec.shape, np.float32)
    if name.endswith(lora.A):
      pieces = peft_adapter.find_pieces(
        NAMES, peft_adapter.find_kernel(name), lora.A, adapter.rank
      )
      for piece in pieces:
        module = piece.tensor.removeprefix("base_model.model.")
        a = goldens.initial_a(
          module.split(".lora_A")[0], piece.layout.tensor_shape
        )
        value[piece.index] = piece.layout.to_variable(a)
    given[name] = value
  given = {k: jnp.asarray(v) for k, v in given.items()}
  return traverse_util.unflatten_dict(given, sep="/")


def _flat(tree):
  return traverse_util.flatten_dict(tree, sep="/")


@pytest.mark.parametrize("kind", goldens.KINDS)
def test_steps_are_those_of_peft(kind, tmp_path):
  read, expected = peft_adapter.read(
    _folder(kind), names=NAMES, kernels=_kernels()
  )
  adapter = read.lora
  assert adapter == lora.Lora(
    rank=goldens.RANK, alpha=goldens.ALPHA, kind=lora.Kind(kind)
  )
  assert read.targets == ("down", "key", "out", "query")
  model, patterns = _model(adapter, read.targets)
  ids = GOLDEN.arrays["ids"]
  specs = variable_groups.freeze(
    variables.specs_of(
      jax.eval_shape(model.init, jax.random.key(0), *_arguments(ids))
    ),
    trainable=patterns,
  )
  assert {n for n in _flat(specs) if n not in NAMES.leaves} == set(expected)
  of = learner.Learner(
    optimizer=adamw.AdamW(
      schedule=schedules.Constant(value=goldens.LEARNING_RATE),
      b2=0.999,
      weight_decay=0.0,
    )
  )
  step = jax.jit(
    train_step.make_train_step(
      _loss_fn(model, ids), learner=of, specs=specs, seed=0
    )
  )
  state = train_state.make_initial(
    _initial(specs, adapter), learner=of, specs=specs
  )
  losses = []
  for _ in range(goldens.STEPS):
    state, metrics = step(state, {})
    losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
  results = _results(kind)
  np.testing.assert_allclose(losses, results["losses"], atol=1e-4)
  trained = _flat(jax.device_get(state.variables))
  for name, value in expected.items():
    np.testing.assert_allclose(trained[name], value, atol=1e-4, err_msg=name)
  # The imported adapter has the logits of PEFT, and so has the merged kernel.
  values = {**_kernels(), **expected}
  logits = jax.jit(model.apply)(_nested(values), *_arguments(ids))
  np.testing.assert_allclose(logits[0, -1], results["logits"], atol=1e-4)
  merged = peft_adapter.merge(values, adapter)
  assert set(merged) == set(NAMES.leaves)
  base = fdl.build(FAMILY.model(GOLDEN.config, fdl.Config))
  logits = jax.jit(base.apply)(_nested(merged), *_arguments(ids))
  np.testing.assert_allclose(logits[0, -1], results["logits"], atol=1e-4)
  # A written folder has the tensors that were read.
  written = epath.Path(tmp_path)
  peft_adapter.write(
    written, expected, names=NAMES, adapter=adapter, kernels=_kernels()
  )
  found, wanted = (
    safetensors_file.read_header(each / peft_adapter.WEIGHTS)
    for each in (written, _folder(kind))
  )
  assert {k: v.shape for k, v in found.items()} == {
    k: v.shape for k, v in wanted.items()
  }
  _, again = peft_adapter.read(written, names=NAMES, kernels=_kernels())
  for name, value in expected.items():
    np.testing.assert_allclose(again[name], value, atol=1e-6)


def _nested(values):
  given = {name: jnp.asarray(value) for name, value in values.items()}
  return traverse_util.unflatten_dict(given, sep="/")


def test_an_adapter_of_another_model_is_an_error():
  other = dict(GOLDEN.config) | {"intermediate_size": 64}
  names = families.find(other).names(other)
  with pytest.raises(
    peft_adapter.AdapterError,
    match=r"of another model: .*down_proj.lora_A.weight must have shape",
  ):
    peft_adapter.read(_folder("lora"), names=names)
  fewer = dict(GOLDEN.config) | {"num_hidden_layers": 2}
  names = families.find(fewer).names(fewer)
  with pytest.raises(peft_adapter.AdapterError, match=r"layers.2.* no linear"):
    peft_adapter.read(_folder("lora"), names=names)


@pytest.mark.parametrize(
  ("changes", "error"),
  [
    ({"r": 0}, "rank must be positive, got 0"),
    ({"peft_type": "LOHA"}, "peft_type must be 'LORA', got 'LOHA'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save must be None"),
  ],
)
def test_unsupported_adapters(changes, error, tmp_path):
  folder = epath.Path(tmp_path)
  config = json.loads((_folder("lora") / peft_adapter.CONFIG).read_text())
  (folder / peft_adapter.CONFIG).write_text(json.dumps(config | changes))
  with pytest.raises(peft_adapter.AdapterError, match=error):
    peft_adapter.read(folder, names=NAMES)
