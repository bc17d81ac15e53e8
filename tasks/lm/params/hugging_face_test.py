"""Tests for the experiment of imported models."""

import json

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer
from paxon.layers.decoding import generate, model_steps, samplers
from paxon.layers.models.hugging_face import (
  families,
  golden_case,
)
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.training import decode
from paxon.sharding import variables
from paxon.tasks.lm.params import hugging_face

_CONFIG = {
  "model_type": "qwen3",
  "vocab_size": 264,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "tie_word_embeddings": True,
}


def _weights(names):
  def read_rows(name, start, stop):
    return golden_case.weight(name, names.tensors[name].shape)[start:stop]

  return {
    name: leaf.from_tensors(read_rows) for name, leaf in names.leaves.items()
  }


def _imported(folder, config):
  """Writes what `tools/hf import` writes; returns the weights."""
  (folder / "hugging_face").mkdir(parents=True)
  (folder / "hugging_face" / "config.json").write_text(json.dumps(config))
  arrays = _weights(families.find(config).names(config))
  tree = {**arrays, "step": np.zeros((), np.int32)}
  specs = {
    name: variables.VariableSpec(name, x.shape, x.dtype, (None,) * x.ndim)
    for name, x in tree.items()
  }
  path = epath.Path(folder / "checkpoints")
  with checkpointer.Checkpointer(path) as checkpoints:
    checkpoints.save(0, jax.tree.map(jnp.asarray, tree), specs=specs, data={})
  return arrays


def _nested(arrays):
  tree = {}
  for name, x in arrays.items():
    place = tree
    *folders, last = name.split("/")
    for folder in folders:
      place = place.setdefault(folder, {})
    place[last] = jnp.asarray(x)
  return tree


def test_decodes_with_imported_weights(tmp_path):
  arrays = _imported(tmp_path, _CONFIG)
  experiment = hugging_face.HuggingFaceLm(
    weights=str(tmp_path), prompts=("abc",), max_new_tokens=5
  )
  job = fdl.build(experiment.job())
  assert decode.run(job, epath.Path(tmp_path), None) == 0
  (line,) = (tmp_path / "decode" / "0.jsonl").read_text().splitlines()
  tokenizer = byte_tokenizer.ByteTokenizer()
  prompt = jnp.asarray([[tokenizer.begin_id, *tokenizer.encode("abc")]])
  model = families.find(_CONFIG).model(_CONFIG)
  expected = generate.generate(
    model_steps.make_prefill(model, _nested(arrays)),
    model_steps.make_decode_step(model, _nested(arrays)),
    prompt,
    jnp.asarray([prompt.shape[1]]),
    sampler=samplers.Greedy(),
    key=jax.random.key(0),
    max_new_tokens=5,
    end_id=tokenizer.end_id,
  )
  ids = expected.ids[0, : int(expected.lengths[0])].tolist()
  assert json.loads(line)["ids"] == ids


def test_prompts_outside_of_the_vocabulary_are_rejected(tmp_path):
  config = {**_CONFIG, "vocab_size": 100}
  _imported(tmp_path, config)
  experiment = hugging_face.HuggingFaceLm(
    weights=str(tmp_path), prompts=("abc",), max_new_tokens=2
  )
  job = fdl.build(experiment.job())
  with pytest.raises(
    user_error.UserError, match=r"id \d+, and the model's vocab_size is 100"
  ):
    decode.run(job, epath.Path(tmp_path), None)


def test_training_starts_from_imported_weights(tmp_path):
  experiment = hugging_face.HuggingFaceLm()
  assert experiment.warm_start() is None
  (tmp_path / "hugging_face").mkdir()
  path = tmp_path / "hugging_face" / "config.json"
  path.write_text(json.dumps(_CONFIG))
  job = hugging_face.HuggingFaceLm(weights=str(tmp_path)).job()
  assert job.warm_start.checkpoint == str(tmp_path)
  assert job.warm_start.cast
  assert job.task.model.stack.num_layers == 2


@pytest.mark.parametrize(
  ("config", "message"),
  [
    (None, "No such file.*give the folder that `tools/hf import` has made"),
    (
      {"model_type": "mamba"},
      "model_type 'mamba' is not supported",
    ),
    ({**_CONFIG, "hidden_act": "x"}, "hidden_act is 'x'; qwen3 supports only"),
    ({"model_type": "t5"}, "a T5ForConditionalGeneration; .* decoders alone"),
  ],
)
def test_rejects_unusable_weights(config, message, tmp_path):
  if config is not None:
    (tmp_path / "hugging_face").mkdir()
    path = tmp_path / "hugging_face" / "config.json"
    path.write_text(json.dumps(config))
  with pytest.raises(user_error.UserError, match=message):
    hugging_face.HuggingFaceLm(weights=str(tmp_path)).job()
