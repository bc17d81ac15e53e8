"""Tests for the experiment of imported models."""

import json
import re

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer
from paxon.layers.decoding import (
  beam_search,
  generate,
  model_steps,
  samplers,
  sampling,
)
from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer, stored_checkpoint
from paxon.runner.evaluation import evaluate, text_evaluation
from paxon.runner.generation import decode
from paxon.runner.session import restore
from paxon.runner.session import session as session_lib
from paxon.runner.settings import generation
from paxon.runner.training import train
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


def _imported(folder, config, arrays=None):
  """Writes what `tools/hf import` writes; returns the weights."""
  (folder / "hugging_face").mkdir(parents=True)
  (folder / "hugging_face" / "config.json").write_text(json.dumps(config))
  arrays = arrays or _weights(families.find(config).names(config))
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
    weights=str(tmp_path), tokenizer="bytes", prompts=("abc",), max_new_tokens=5
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


@pytest.mark.parametrize(
  ("file", "knobs", "expected"),
  [
    ({}, {}, {"sampler": samplers.Greedy()}),
    (
      {"do_sample": True, "temperature": 0.7},
      {},
      {"sampler": samplers.Temperature(temperature=0.7, top_k=50)},
    ),
    (
      {"repetition_penalty": 1.1},
      {},
      {"sampler": sampling.Settings(temperature=0.0, repetition_penalty=1.1)},
    ),
    (
      {"repetition_penalty": 1.0, "min_new_tokens": 0, "num_beams": 1},
      {},
      {"sampler": samplers.Greedy()},
    ),
    (
      {
        "do_sample": True,
        "top_k": 0,
        "min_p": 0.05,
        "typical_p": 0.9,
        "epsilon_cutoff": 0.01,
        "min_new_tokens": 3,
      },
      {},
      {
        "sampler": sampling.Settings(
          min_p=0.05, typical_p=0.9, epsilon=0.01, min_new_tokens=3
        )
      },
    ),
    (
      {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.1},
      {"temperature": 0.5},
      {"sampler": sampling.Settings(temperature=0.5, repetition_penalty=1.1)},
    ),
    (
      {"num_beams": 3, "length_penalty": 0.6, "early_stopping": True},
      {},
      {
        "search": beam_search.BeamSearch(
          beam_size=3,
          length_alpha=0.6,
          length_offset=0.0,
          pool=beam_search.Pool.TOP,
          stop=beam_search.Stop.FULL,
        )
      },
    ),
    (
      {"do_sample": True, "temperature": None, "top_k": None},
      {},
      {"sampler": samplers.Temperature(temperature=1.0, top_k=50)},
    ),
    (
      {"num_beams": 3},
      {"temperature": 0.5},
      {"sampler": samplers.Temperature(temperature=0.5)},
    ),
  ],
)
def test_generation_settings_of_a_file(file, knobs, expected):
  settings = fdl.Config(generation.GenerationSettings)
  if knobs:
    settings.sampler = generation.make_sampler(knobs["temperature"], None, None)
  generation.use_file(settings, file, generation.GenerationKnobs(**knobs))
  assert fdl.build(settings) == generation.GenerationSettings(**expected)


@pytest.mark.nightly
def test_decodes_beams_alternatives_and_stops(tmp_path):
  arrays = _imported(tmp_path, _CONFIG)
  base = hugging_face.HuggingFaceLm(
    weights=str(tmp_path), tokenizer="bytes", prompts=("abc",), max_new_tokens=5
  )
  model = families.find(_CONFIG).model(_CONFIG)

  def decoded(experiment, **fields):
    config = experiment.job()
    for name, value in fields.items():
      setattr(config.generation, name, value)
    job = fdl.build(config)
    assert decode.run(job, epath.Path(tmp_path), None) == 0
    text = (tmp_path / "decode" / "0.jsonl").read_text()
    return [
      line
      for line in map(json.loads, text.splitlines())
      if line["sampler"]
      == decode.get_name(job.generation.search or job.generation.sampler)
    ]

  tokenizer = byte_tokenizer.ByteTokenizer()
  prompt = [tokenizer.begin_id, *tokenizer.encode("abc").tolist()]

  def log_probs(added):
    """By a forward pass, float32 [added, vocab]."""
    ids = np.zeros((1, 16), np.int32)
    ids[0, : len(prompt) + len(added)] = [*prompt, *added]
    positions = np.arange(16)[None]
    segments = (positions < len(prompt) + len(added)).astype(np.int32)
    logits = jax.jit(model.apply)(_nested(arrays), ids, positions, segments)
    first = len(prompt) - 1
    return np.asarray(jax.nn.log_softmax(logits[0, first:]))[: len(added)]

  (greedy,) = decoded(base, num_alternatives=2)
  beams = decoded(base.replace(beam_size=2, num_samples=2))
  assert [line["sample"] for line in beams] == [0, 1]
  assert beams[0]["ids"] != beams[1]["ids"]
  for line in (greedy, *beams):
    rows = log_probs(line["ids"])
    expected = rows[range(len(rows)), line["ids"]]
    np.testing.assert_allclose(line["log_probs"], expected, rtol=1e-4)
    is_end = line["ids"][-1] == tokenizer.end_id
    assert line["finish_reason"] == ("stop" if is_end else "length")
  rows = log_probs(greedy["ids"])
  for row, pairs in zip(rows, greedy["alternatives"], strict=True):
    order = np.argsort(-row, kind="stable")[:2]
    assert [pair[0] for pair in pairs] == order.tolist()
    np.testing.assert_allclose(
      [pair[1] for pair in pairs], row[order], rtol=1e-4
    )


@pytest.mark.nightly
def test_bfloat16_imports_are_used_as_they_are(tmp_path, capsys):
  wide = _imported(tmp_path / "wide", _CONFIG)
  narrow = {
    name: np.asarray(value).astype(jnp.bfloat16) for name, value in wide.items()
  }
  _imported(tmp_path / "narrow", _CONFIG, narrow)
  # The same values as the narrow ones, in float32.
  rounded = {name: x.astype(np.float32) for name, x in narrow.items()}
  _imported(tmp_path / "rounded", _CONFIG, rounded)
  text = tmp_path / "text.jsonl"
  text.write_text(json.dumps({"text": "in half the memory " * 30}) + "\n")
  ids, losses = [], []
  for name in ("narrow", "rounded"):
    experiment = hugging_face.HuggingFaceLm(
      weights=str(tmp_path / name),
      tokenizer="bytes",
      prompts=("abc",),
      max_new_tokens=5,
      train_files=str(text),
      validation_files=str(text),
      length=64,
    )
    folder = epath.Path(tmp_path / name)
    assert decode.run(fdl.build(experiment.job()), folder, None) == 0
    (line,) = (folder / "decode" / "0.jsonl").read_text().splitlines()
    ids.append(json.loads(line)["ids"])
    capsys.readouterr()
    assert evaluate.run(fdl.build(experiment.job()), folder) == 0
    # Without the speed at the end of the line.
    losses.append(capsys.readouterr().out.rsplit(" ", 1)[0])
  assert ids[0] == ids[1]
  assert "bits_per_byte" in losses[0]
  assert losses[0] == losses[1]
  job = fdl.build(hugging_face.HuggingFaceLm(weights=str(folder)).job())
  session = session_lib.open_session(job)
  stored, _ = restore.read_for_evaluation(
    session, epath.Path(tmp_path / "narrow" / "checkpoints")
  )
  sizes = [
    sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.variables))
    for state in (session.abstract_state(), stored.abstract_state())
  ]
  assert sizes[0] == 2 * sizes[1]


def test_an_upcycled_import_is_the_same_function(tmp_path):
  arrays = _imported(tmp_path, _CONFIG)
  experiment = hugging_face.HuggingFaceUpcycled(
    weights=str(tmp_path), tokenizer="bytes", num_experts=4
  )
  session = session_lib.open_session(fdl.build(experiment.job()))
  state = restore.warm_start(session, session.job.warm_start)
  job = fdl.build(experiment.replace(quantization="fp8").job())
  low = restore.warm_start(session_lib.open_session(job), job.warm_start)
  assert not any(map(np.any, jax.tree.leaves(low.variables["fp8"])))
  layer = "params/stack/layers/blocks_0/feed_forward"
  made = state.variables["params"]["stack"]["layers"]["blocks_0"]
  np.testing.assert_array_equal(
    made["feed_forward"]["experts"]["down"],
    np.broadcast_to(arrays[f"{layer}/down"][:, None], (2, 4, 48, 32)),
  )
  tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 264)
  dense = families.find(_CONFIG).model(_CONFIG)
  np.testing.assert_allclose(
    jax.jit(session.job.task.model.apply)(state.variables, tokens),
    jax.jit(dense.apply)(_nested(arrays), tokens),
    atol=1e-5,
    rtol=1e-5,
  )


@pytest.mark.nightly
def test_runs_keep_the_files_for_their_export(tmp_path):
  source, folder = tmp_path / "imported", epath.Path(tmp_path / "run")
  _imported(source, _CONFIG)
  text = tmp_path / "text.jsonl"
  text.write_text(json.dumps({"text": "some text " * 50}) + "\n")
  config = hugging_face.HuggingFaceLm(
    weights=str(source),
    tokenizer="bytes",
    train_files=str(text),
    num_train_steps=1,
    checkpoint_every_steps=None,
    eval_every_steps=None,
    length=32,
    loss_chunk_length=None,
    max_new_tokens=1,
  ).job()
  folder.mkdir()
  train.run(fdl.build(config), config, folder)
  # As `tools/hf export` reads them.
  stored = stored_checkpoint.find_checkpoint(folder)
  files = stored.run_path / "hugging_face"
  assert json.loads((files / "config.json").read_text()) == _CONFIG
  leaves = families.find(_CONFIG).names(_CONFIG).leaves
  shapes = {name: x.shape for name, x in stored.variables().items()}
  assert shapes == {name: leaf.shape for name, leaf in leaves.items()}


def _pretrained(tmp_path, case, **changes):
  """Returns the folder of an imported golden model, and its configuration."""
  # The ids of bytes.
  config = {**golden_case.read(case).config, "vocab_size": 264, **changes}
  _imported(tmp_path / case, config)
  return tmp_path / case, config


def _train(tmp_path, cls, folder, **knobs):
  """Trains for a step and evaluates; returns the job."""
  config = cls(
    weights=str(folder),
    tokenizer="bytes",
    num_train_steps=1,
    checkpoint_every_steps=None,
    eval_every_steps=1,
    loss_chunk_length=None,
    **knobs,
  ).job()
  run = epath.Path(tmp_path / "run")
  run.mkdir()
  result = train.run(fdl.build(config), config, run)
  assert np.isfinite(result.evaluations[1]["validation"]["log_pplx"])
  assert (run / "hugging_face" / "config.json").exists()
  return config


@pytest.mark.nightly
def test_t5_trains_and_decodes(tmp_path):
  folder, config = _pretrained(tmp_path, "t5_v1_1")
  text = tmp_path / "pairs.jsonl"
  pair = {"inputs": "a source", "targets": "the target"}
  text.write_text(f"{json.dumps(pair)}\n" * 20)
  files = {"train_files": str(text), "validation_files": str(text)}
  job = _train(
    tmp_path,
    hugging_face.HuggingFaceT5,
    folder,
    length=32,
    source_length=32,
    prompts=None,
    max_new_tokens=None,
    **files,
  )
  batch = fdl.build(job).train_input.get_next()
  tokenizer = byte_tokenizer.ByteTokenizer()
  ids = [*tokenizer.encode("a source"), tokenizer.end_id]
  assert batch["encoder_inputs"][0, : len(ids)].tolist() == ids
  # The imported weights, without training.
  again = hugging_face.HuggingFaceT5(
    weights=str(folder),
    tokenizer="bytes",
    prompts=("a source",),
    max_new_tokens=3,
    **files,
  ).job()
  assert decode.run(fdl.build(again), epath.Path(folder), None) == 0
  (line,) = (folder / "decode" / "0.jsonl").read_text().splitlines()
  found = json.loads(line)["ids"]
  # Greedy, by whole forward passes.
  model = families.find(config).model(config)
  weights = _nested(_weights(families.find(config).names(config)))
  source = jnp.asarray([ids])
  target = jnp.zeros((1, len(found) + 1), jnp.int32)
  target = target.at[0, 0].set(tokenizer.begin_id)
  forward = jax.jit(model.apply)
  for i in range(len(found)):
    logits = forward(
      weights,
      *(target, jnp.arange(target.shape[1])[None], jnp.ones_like(target)),
      *(source, jnp.arange(len(ids))[None], jnp.ones_like(source)),
    )
    target = target.at[0, i + 1].set(logits[0, i].argmax())
  assert found == target[0, 1:].tolist()


def _write_words(folder, **special):
  """Writes a tokenizer of words, `w10` being 10, with some special tokens."""
  words = {f"w{i}": i for i in range(40) if i not in special.values()}
  flags = ("single_word", "lstrip", "rstrip", "normalized")
  added = [
    {"id": i, "content": name, "special": True} | dict.fromkeys(flags, False)
    for name, i in special.items()
  ]
  model = {"type": "WordLevel", "vocab": words | special, "unk_token": "w39"}
  content = {"version": "1.0", "added_tokens": added, "model": model}
  content["pre_tokenizer"] = {"type": "WhitespaceSplit"}
  (folder / "tokenizer.json").write_text(json.dumps(content))
  config = {"eos_token": "</s>", "pad_token": "[PAD]"}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_t5_begins_with_its_own_token(tmp_path):
  # As of transformers, see `PreTrainedModel.generate` and `_shift_right`.
  changes = {"decoder_start_token_id": 7, "pad_token_id": 4}
  folder, _ = _pretrained(tmp_path, "t5_v1_1", **changes)
  tokens = {"</s>": 1, "[PAD]": 4, "[GO]": 7}
  _write_words(folder / "hugging_face", **tokens)
  text = tmp_path / "pairs.jsonl"
  text.write_text(json.dumps({"inputs": "w10 w11", "targets": "w12"}) + "\n")
  made = hugging_face.HuggingFaceT5(
    weights=str(folder), train_files=str(text), length=8, source_length=8
  )
  source = fdl.build(made.job()).train_input
  batch = source.get_next()
  assert batch["inputs"][0, :2].tolist() == [7, 12]
  assert batch["targets"][0, :2].tolist() == [12, 1]
  assert set(batch["encoder_inputs"].ravel().tolist()) <= {10, 11, 1, 4}
  path = folder / "hugging_face" / "config.json"
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | {"decoder_start_token_id": None}))
  assert fdl.build(made.get_data_fields()["tokenizer"]).begin_id == 4
  path.write_text(json.dumps(config | {"decoder_start_token_id": 99}))
  with pytest.raises(
    user_error.UserError,
    match=r"decoder_start_token_id must be the id of a token of .*, got 99",
  ):
    made.get_data_fields()


def test_few_positions_need_few_new_tokens(tmp_path):
  folder, _ = _pretrained(tmp_path, "gpt2", n_positions=20)
  made = hugging_face.HuggingFaceLm(weights=str(folder), tokenizer="bytes")
  assert made.max_new_tokens == 10
  assert made.replace(max_new_tokens=30).max_new_tokens == 30
  assert hugging_face.HuggingFaceLm().max_new_tokens == 128


@pytest.mark.nightly
def test_mixtures_train_and_decode(tmp_path):
  layers = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
  folder, config = _pretrained(tmp_path, "gpt_oss", **layers)
  text = tmp_path / "text.jsonl"
  text.write_text('{"text": "some text of a document"}\n' * 40)
  experiment = hugging_face.HuggingFaceLm(
    weights=str(folder),
    tokenizer="bytes",
    train_files=str(text),
    num_train_steps=2,
    checkpoint_every_steps=None,
    eval_every_steps=None,
    summary_every_steps=1,
    length=32,
    loss_chunk_length=None,
    prompts=("abc",),
    max_new_tokens=4,
  )
  job = experiment.job()
  run = epath.Path(tmp_path / "run")
  run.mkdir()
  train.run(fdl.build(job), job, run)
  stored = stored_checkpoint.find_checkpoint(run)
  leaves = families.find(config).names(config).leaves
  shapes = {name: x.shape for name, x in stored.variables().items()}
  assert shapes == {name: leaf.shape for name, leaf in leaves.items()}
  name = "params/stack/layers/blocks_0/feed_forward/router/logits/kernel"
  (before, after) = (
    _weights(families.find(config).names(config))[name],
    stored_checkpoint.read_numpy(stored, [name])[name],
  )
  assert np.abs(before - after).max() > 0
  assert decode.run(fdl.build(job), epath.Path(folder), None) == 0
  (line,) = (folder / "decode" / "0.jsonl").read_text().splitlines()
  found = json.loads(line)["ids"]
  # Greedy, by whole forward passes.
  tokenizer = byte_tokenizer.ByteTokenizer()
  ids = [tokenizer.begin_id, *tokenizer.encode("abc")]
  model = families.find(config).model(config)
  weights = _nested(_weights(families.find(config).names(config)))
  forward = jax.jit(model.apply)
  row = (
    jnp.zeros((1, len(ids) + 4), jnp.int32)
    .at[0, : len(ids)]
    .set(jnp.asarray(ids))
  )
  for i in range(len(found)):
    positions = jnp.arange(row.shape[1])[None]
    logits = forward(weights, row, positions, jnp.ones_like(row))
    at = len(ids) + i
    row = row.at[0, at].set(logits[0, at - 1].argmax())
  assert found == row[0, len(ids) : len(ids) + len(found)].tolist()


@pytest.mark.nightly
def test_bert_trains(tmp_path):
  folder, _ = _pretrained(tmp_path, "bert")
  text = tmp_path / "text.jsonl"
  text.write_text(json.dumps({"text": "some text " * 50}) + "\n")
  _train(
    tmp_path,
    hugging_face.HuggingFaceBert,
    folder,
    length=16,
    train_files=str(text),
    validation_files=str(text),
  )


def test_encoders_with_another_head_are_rejected(tmp_path):
  folder, _ = _pretrained(tmp_path, "bert_classifier")
  with pytest.raises(
    user_error.UserError, match=r"a BertForSeq.*; .* language models alone"
  ):
    hugging_face.HuggingFaceBert(weights=str(folder)).job()


def test_prompts_outside_of_the_vocabulary_are_rejected(tmp_path):
  config = {**_CONFIG, "vocab_size": 100}
  _imported(tmp_path, config)
  experiment = hugging_face.HuggingFaceLm(
    weights=str(tmp_path), tokenizer="bytes", prompts=("abc",), max_new_tokens=2
  )
  job = fdl.build(experiment.job())
  with pytest.raises(
    user_error.UserError, match=r"'abc' is not in the model's .* has 100 ids"
  ):
    decode.run(job, epath.Path(tmp_path), None)


def test_text_without_a_tokenizer_is_an_error(tmp_path):
  _imported(tmp_path, _CONFIG)
  weights = str(tmp_path)
  folder = re.escape(f"{weights}/hugging_face")
  # As for runs that read files of tokens.
  job = fdl.build(hugging_face.HuggingFaceLm(weights=weights).job())
  assert job.task.tokenizer is None
  for method in (decode.run, text_evaluation.run):
    with pytest.raises(
      user_error.UserError, match=rf"{folder}; pass --fdl.tokenizer=PATH"
    ):
      method(job, epath.Path(tmp_path), "abc")
  with pytest.raises(
    user_error.UserError,
    match=rf"{folder} has no file of one \(tokenizer.json, .*=bytes for bytes",
  ):
    hugging_face.HuggingFaceLm(weights=weights, train_files="a.jsonl").job()


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
    ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
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
