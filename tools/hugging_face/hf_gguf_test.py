"""Tests of GGUF files, read by the gguf package and by transformers."""

import importlib.util
import itertools
import json
import os

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)
from paxon.tools.hf_goldens import imported_models
from paxon.tools.hugging_face import hf_gguf, hf_main

_HAS_ORACLE = all(
  importlib.util.find_spec(name) for name in ("torch", "transformers")
)
_PLAIN = {
  "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
  "use_sliding_window": False,
  "sliding_window": None,
  "layer_types": None,
}
# Blocks have 32 inputs.
_WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def _config(name, **changes):
  config = imported_models.read_goldens()[name]["config"]
  if name.startswith("qwen"):
    config |= _PLAIN
  config |= {"hidden_act": "silu", **changes}
  return {k: v for k, v in config.items() if v is not None}


def _write(folder, name, **changes):
  config = _config(name, **changes)
  imported_models.write(folder, name, config)
  return config


def _convert(folder, name, *options, **changes):
  """Returns the configuration, and the fields and tensors of the file."""
  config = _write(folder / "model", name, **changes)
  target = folder / "model.gguf"
  command = ["gguf", folder / "model", "--to", target, *options]
  assert hf_main.main([os.fspath(each) for each in command]) == 0
  reader = gguf.GGUFReader(target)
  fields = {key: field.contents() for key, field in reader.fields.items()}
  return config, fields, {each.name: each for each in reader.tensors}


def _weights(config):
  names = families.find(config).names(config)
  return {
    name: golden_case.weight(name, tensor.shape)
    for name, tensor in names.tensors.items()
  }


@pytest.mark.parametrize("name", ["llama2", "llama3", "mistral", "qwen3"])
def test_tensors_and_fields_are_those_of_the_model(name, tmp_path, capsys):
  config, fields, tensors = _convert(tmp_path, name, "--type=f32")
  arch = "qwen3" if name == "qwen3" else "llama"
  heads = config["num_attention_heads"]
  assert fields["general.architecture"] == arch
  for key, expected in {
    "attention.head_count": heads,
    "attention.head_count_kv": config["num_key_value_heads"],
    "attention.key_length": config["head_dim"],
    "block_count": config["num_hidden_layers"],
    "embedding_length": 32,
    "feed_forward_length": 48,
    "context_length": 128,
    "rope.freq_base": config["rope_parameters"]["rope_theta"],
    "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
  }.items():
    assert fields[f"{arch}.{key}"] == pytest.approx(expected), key
  weights = _weights(config)
  if config["tie_word_embeddings"]:
    assert "output.weight" not in tensors
  extra = {"rope_freqs.weight"} if name == "llama3" else set()
  assert len(tensors) == len(weights) + len(extra)
  table = tensors["token_embd.weight"].data
  np.testing.assert_array_equal(table, weights["model.embed_tokens.weight"])
  down = tensors["blk.1.ffn_down.weight"].data
  np.testing.assert_array_equal(
    down, weights["model.layers.1.mlp.down_proj.weight"]
  )
  query = weights["model.layers.0.self_attn.q_proj.weight"]
  if arch == "llama":
    # Feature 2i of a head is feature i of its first half, 2i + 1 of its second.
    size = config["head_dim"]
    order = np.arange(size).reshape(2, -1).T.reshape(-1)
    rows = np.arange(heads)[:, None] * size + order
    query = query[rows.reshape(-1)]
  found = tensors["blk.0.attn_q.weight"].data
  np.testing.assert_array_equal(found, query)
  printed = capsys.readouterr().out
  assert ("sliding_window=7 is not stored" in printed) == (name == "mistral")
  assert not [*tmp_path.glob("*.part")]


def test_frequencies_of_llama_3_are_divided(tmp_path):
  config, _, tensors = _convert(tmp_path, "llama3")
  rope, size = config["rope_parameters"], config["head_dim"]
  found = tensors["rope_freqs.weight"].data
  expected = []
  for i in range(size // 2):
    length = 2 * np.pi * rope["rope_theta"] ** (2 * i / size)
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if length < original / high:
      expected.append(1.0)
    elif length > original / low:
      expected.append(rope["factor"])
    else:
      smooth = (original / length - low) / (high - low)
      expected.append(1 / ((1 - smooth) / rope["factor"] + smooth))
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  assert len({*expected}) > 2


@pytest.mark.parametrize("type_", ["f16", "bf16", "q8_0", "q4_0"])
def test_types_of_matrices(type_, tmp_path):
  config, fields, tensors = _convert(
    tmp_path, "qwen2", f"--type={type_}", **_WIDE
  )
  weights = _weights(config)
  assert fields["general.quantization_version"] == 2
  norm = tensors["blk.0.attn_norm.weight"]
  assert norm.tensor_type.name == "F32"
  found = tensors["blk.0.ffn_up.weight"]
  assert found.tensor_type.name == type_.upper()
  exact = weights["model.layers.0.mlp.up_proj.weight"]
  restored = gguf.quants.dequantize(found.data, found.tensor_type)
  assert restored.shape == exact.shape
  if type_ == "bf16":
    np.testing.assert_array_equal(
      restored, np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float32)
    )
  # Of the largest of a block: half a step, and that of a float16 scale.
  steps = {"f16": 2**-11, "bf16": 2**-8, "q8_0": 0.0045, "q4_0": 0.126}
  blocks = np.abs(exact).reshape(len(exact), -1, 32).max(axis=2)
  limit = np.repeat(blocks * steps[type_], 32, axis=1)
  assert np.all(np.abs(restored - exact) <= limit * 1.01)
  table = tensors["token_embd.weight"].tensor_type.name
  assert table == ("Q8_0" if type_ == "q4_0" else type_.upper())


def test_byte_level_bpe_is_kept(tmp_path):
  _, fields, _ = _convert(tmp_path, "qwen3")
  path = imported_models.FOLDER / "bytes" / "tokenizer.json"
  content = json.loads(path.read_text())
  tokens = fields["tokenizer.ggml.tokens"]
  assert fields["tokenizer.ggml.model"] == "gpt2"
  assert fields["tokenizer.ggml.pre"] == "gpt-2"
  assert len(tokens) == 340
  for token, number in content["model"]["vocab"].items():
    assert tokens[number] == token
  merges = content["model"]["merges"]
  assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
  types = fields["tokenizer.ggml.token_type"]
  assert types[0] == gguf.TokenType.CONTROL
  assert types[339] == gguf.TokenType.UNUSED
  assert tokens[fields["tokenizer.ggml.eos_token_id"]].startswith("<|")
  assert "message" in fields["tokenizer.chat_template"]


def test_pieces_are_merged_in_the_order_of_their_scores(tmp_path):
  """As llama.cpp does: the pair whose joined piece has the highest score."""
  import tokenizers

  _, fields, _ = _convert(tmp_path, "llama2")
  path = imported_models.FOLDER / "pieces" / "tokenizer.json"
  oracle = tokenizers.Tokenizer.from_file(os.fspath(path))
  tokens = fields["tokenizer.ggml.tokens"]
  ids = {token: i for i, token in enumerate(tokens)}
  scores = fields["tokenizer.ggml.scores"]
  assert fields["tokenizer.ggml.model"] == "llama"
  text = "The quick brown fox, naïve def add(x, y):"
  for word in text.split():
    expected = oracle.encode(word, add_special_tokens=False).tokens
    parts = list("".join(expected))
    if any(part not in ids for part in parts):
      continue
    while True:
      joined = [
        (scores[ids[a + b]], -i)
        for i, (a, b) in enumerate(itertools.pairwise(parts))
        if a + b in ids
      ]
      if not joined:
        break
      i = -max(joined)[1]
      parts[i : i + 2] = [parts[i] + parts[i + 1]]
    assert parts == expected
  types = fields["tokenizer.ggml.token_type"]
  assert types[ids["<0x41>"]] == gguf.TokenType.BYTE


@pytest.mark.skipif(
  not _HAS_ORACLE,
  reason="torch and transformers are not here; --config=oracle brings them",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("type_", ["f32", "q8_0"])
@pytest.mark.parametrize("name", ["llama2", "qwen2", "qwen3"])
def test_transformers_reads_the_model(name, type_, tmp_path):
  import torch  # pyrefly: ignore[missing-import]
  import transformers  # pyrefly: ignore[missing-import]

  config, _, _ = _convert(tmp_path, name, f"--type={type_}", **_WIDE)
  # It reads no width of heads for Qwen3.
  given = {}
  if name == "qwen3":
    path = tmp_path / "model"
    given["config"] = transformers.AutoConfig.from_pretrained(path)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, gguf_file="model.gguf", dtype=torch.float32, **given
  ).eval()
  ids = np.arange(3, 27, dtype=np.int32).reshape(2, 12)
  with torch.no_grad():
    found = model(torch.from_numpy(ids).long()).logits.numpy()
  of = families.find(config)
  ours = testing.causal_lm_logits(of, config, ids)
  error = np.linalg.norm(found - ours) / np.linalg.norm(ours)
  # Rounding of random weights, whose logits differ by little.
  assert error < (1e-5 if type_ == "f32" else 0.05)


def _write_pieces(folder, **options):
  """Replaces the tokenizer by a SentencePiece model."""
  import sentencepiece

  (folder / "text").write_text(imported_models.TEXT * 20)
  sentencepiece.SentencePieceTrainer.train(
    input=os.fspath(folder / "text"),
    model_prefix=os.fspath(folder / "tokenizer"),
    vocab_size=330,
    byte_fallback=True,
    minloglevel=2,
    **options,
  )


def test_tokens_are_added_to_pieces(tmp_path):
  folder, target = tmp_path / "model", tmp_path / "model.gguf"
  _write(folder, "llama2")
  _write_pieces(folder, model_type="bpe")
  added = {"332": {"content": "<|im_end|>", "special": True}}
  (folder / "tokenizer_config.json").write_text(
    json.dumps({"added_tokens_decoder": added, "eos_token": "<|im_end|>"})
  )
  (folder / "added_tokens.json").write_text('{"<tool>": 330}')
  command = ["gguf", os.fspath(folder), "--to", os.fspath(target)]
  assert hf_main.main(command) == 0
  fields = gguf.GGUFReader(target).fields
  tokens = fields["tokenizer.ggml.tokens"].contents()
  types = fields["tokenizer.ggml.token_type"].contents()
  kinds = gguf.TokenType
  assert tokens[330:334] == ["<tool>", "[PAD331]", "<|im_end|>", "[PAD333]"]
  expected = [kinds.USER_DEFINED, kinds.UNUSED, kinds.CONTROL, kinds.UNUSED]
  assert types[330:334] == expected
  assert fields["tokenizer.ggml.eos_token_id"].contents() == 332
  assert len(fields["tokenizer.ggml.scores"].contents()) == len(tokens) == 340


def test_fields_of_yarn(tmp_path, capsys):
  yarn = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 8.0,
    "original_max_position_embeddings": 64,
  }
  _, fields, _ = _convert(tmp_path, "qwen3", rope_parameters=yarn)
  assert fields["qwen3.rope.scaling.type"] == "yarn"
  assert fields["qwen3.rope.scaling.original_context_length"] == 64
  (name,) = (key for key in fields if key.endswith("beta_fast"))
  assert fields[name] == 8.0
  folder = tmp_path / "other" / "model"
  folder.parent.mkdir()
  yarn["attention_factor"] = 2.0
  _write(folder, "qwen3", rope_parameters=yarn)
  assert "attention_factor=2.0 for YaRN" in _error(capsys, folder)


def _error(capsys, folder, target="out.gguf", *options):
  command = ["gguf", folder, "--to", folder.parent / target, *options]
  assert hf_main.main([os.fspath(each) for each in command]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert not [*folder.parent.glob("*.gguf*")]
  return line


def test_rejects_what_it_cannot_store(tmp_path, capsys):
  folder = tmp_path / "model"
  _write(folder, "qwen3")
  assert "must be a file whose name ends with .gguf" in _error(
    capsys, folder, "out.bin"
  )
  (folder / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
  assert "is not a BPE tokenizer" in _error(capsys, folder)
  (folder / "tokenizer.json").unlink()
  assert "has neither tokenizer.model nor tokenizer.json" in _error(
    capsys, folder
  )
  _write(folder, "qwen3", use_sliding_window=True)
  assert "has use_sliding_window=True; the architecture qwen3" in _error(
    capsys, folder
  )
  _write(folder, "qwen2", intermediate_size=40)
  assert "down_proj.weight has 40 inputs; q8_0 needs a multiple of 32" in (
    _error(capsys, folder, "out.gguf", "--type=q8_0")
  )
  _write(folder, "qwen3", rms_norm_eps=None)
  assert "does not have rms_norm_eps, which gguf needs" in (
    _error(capsys, folder)
  )
  _write(folder, "llama2")
  _write_pieces(folder, model_type="unigram", hard_vocab_limit=False)
  assert "is a unigram model" in _error(capsys, folder)
  config = {**_config("qwen3"), "model_type": "bert"}
  (folder / "config.json").write_text(json.dumps(config))
  assert "model_type 'bert', which gguf cannot store" in _error(capsys, folder)


def test_never_overwrites(tmp_path, capsys):
  folder, target = tmp_path / "model", tmp_path / "a.gguf"
  _write(folder, "qwen3")
  target.write_text("mine")
  command = ["gguf", os.fspath(folder), "--to", os.fspath(target)]
  assert hf_main.main(command) == 2
  assert "a.gguf exists; pass another file" in capsys.readouterr().err
  assert target.read_text() == "mine"
  assert hf_gguf.TYPES[2] == "bf16"
