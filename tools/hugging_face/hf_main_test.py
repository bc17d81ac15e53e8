"""Tests for weights of Hugging Face, in and out."""

import json
import os
import shutil
import threading

from etils import epath
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.runner.checkpoints import stored_checkpoint
from paxon.tools.hugging_face import hf_export, hf_import, hf_main

_METADATA = {"format": "pt"}


def _model(folder, config, *, dtype=np.float32, more=None, leave_out=()):
  """Writes a model as transformers does; returns its tensors."""
  names = families.find(config).names(config)
  tensors = {
    name: golden_case.weight(name, tensor.shape).astype(dtype)
    for name, tensor in names.tensors.items()
    if name not in leave_out
  }
  tensors |= more or {}
  folder.mkdir()
  safetensors_numpy.save_file(
    tensors, folder / "model.safetensors", metadata=_METADATA
  )
  (folder / "config.json").write_text(json.dumps(config))
  return tensors


def _config(case, **changes):
  return {**golden_case.read(case).config, **changes}


def test_only_models_of_text_store_an_experiment():
  found = hf_import.find_experiment("MT5ForConditionalGeneration")
  assert found == "paxon.tasks.lm.params.hugging_face.HuggingFaceT5"
  assert hf_import.find_experiment("WhisperForConditionalGeneration") is None


def _run(*argv):
  return hf_main.main([os.fspath(arg) for arg in argv])


def _error(capsys, *argv):
  """Returns the one line on stderr of a command that fails."""
  assert _run(*argv) == 2
  (line,) = capsys.readouterr().err.splitlines()
  return line


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("case", "dtype"),
  [
    ("llama3", jnp.bfloat16),
    ("phi3", np.float32),
    ("gemma2", jnp.bfloat16),
    ("t5_v1_1", np.float32),  # Shared parameters, and two stacks.
    ("bert", np.float32),
    ("clip", np.float32),  # Two towers, and a scalar.
    ("deepseek_v3", np.float32),
    ("qwen2_moe", jnp.bfloat16),
    # Two variables share the columns of a tensor.
    ("gpt_oss", np.float32),
  ],
)
def test_round_trip_is_the_same_file(case, dtype, tmp_path, capsys):
  source, run, back = (tmp_path / name for name in ("source", "run", "back"))
  _model(source, _config(case, dtype=np.dtype(dtype).name), dtype=dtype)
  (source / "tokenizer.json").write_text("{}")
  (source / "spm.model").write_text("")
  (source / "preprocessor_config.json").write_text("{}")
  (source / "README.md").write_text("not copied")
  assert _run("import", source, "--to", run) == 0
  printed = capsys.readouterr().out
  images = "preprocessor_config.json"
  assert f"copied: config.json, {images}, spm.model, tokenizer" in printed
  assert "warning" not in printed.replace("warning: the tokenizer cannot", "")
  assert _run("export", run, "--to", back) == 0
  kept = {path.name for path in source.iterdir()} - {"README.md"}
  assert {path.name for path in back.iterdir()} == kept
  for path in back.iterdir():
    assert path.read_bytes() == (source / path.name).read_bytes()


def test_modules_of_further_tokens_may_be_absent(tmp_path, capsys):
  """DeepSeek's files have them and two copies; transformers writes none."""
  config, layer = _config("deepseek_v3", dtype="float32"), "model.layers.2"
  names = families.find(config).names(config).tensors
  further = [name for name in names if name.startswith(layer)]
  copies = {
    f"{layer}.{name}.weight": golden_case.weight(f"{of}.weight", (64, 32))
    for name, of in (
      ("embed_tokens", "model.embed_tokens"),
      ("shared_head.head", "lm_head"),
    )
  }
  whole, bare, partial = (tmp_path / name for name in ("whole", "bare", "part"))
  tensors = _model(whole, config, more=copies)
  assert _run("import", whole, "--to", tmp_path / "run") == 0
  assert _run("export", tmp_path / "run", "--to", tmp_path / "back") == 0
  found = safetensors_numpy.load_file(tmp_path / "back" / "model.safetensors")
  assert found.keys() == tensors.keys() - copies.keys()
  capsys.readouterr()
  _model(bare, config, leave_out=further)
  assert _run("import", bare, "--to", tmp_path / "run2") == 0
  printed = capsys.readouterr().out
  assert "num_nextn_predict_layers: imported without" in printed
  made = json.loads((tmp_path / "run2/hugging_face/config.json").read_text())
  assert made == {**config, "num_nextn_predict_layers": 0}
  _model(partial, config, leave_out=further[:1])
  line = _error(capsys, "import", partial, "--to", tmp_path / "run3")
  assert f"{further[0]} " in line
  assert "is missing" in line


def test_old_files_without_prefix_and_with_masks(tmp_path, capsys):
  source, run, back = (tmp_path / name for name in ("source", "run", "back"))
  tensors = _model(source, _config("gpt2"))
  old = {name.removeprefix("transformer."): x for name, x in tensors.items()}
  old["h.0.attn.bias"] = np.ones((1, 1, 24, 24), np.uint8)
  old["lm_head.weight"] = old["wte.weight"].copy()
  generation = {"stop_strings": ["\n\n"], "num_beams": 4, "do_sample": True}
  (source / "generation_config.json").write_text(json.dumps(generation))
  safetensors_numpy.save_file(old, source / "model.safetensors")
  assert _run("import", source, "--to", run) == 0
  printed = capsys.readouterr().out
  assert f"warning: {source} has no tokenizer file" in printed
  assert "json: stop_strings=['\\n\\n'], num_beams=4 with do_sample" in printed
  assert _run("export", run, "--to", back) == 0
  # As transformers writes it today: names whole, tied tensors once, no masks.
  found = safetensors_numpy.load_file(back / "model.safetensors")
  assert set(found) == set(tensors)
  for name, x in tensors.items():
    np.testing.assert_array_equal(found[name], x)


def test_old_t5_without_a_head(tmp_path):
  source, run, back = (tmp_path / name for name in ("source", "run", "back"))
  head = "lm_head.weight"
  tensors = _model(source, _config("t5_v1_1"), leave_out=(head,))
  assert _run("import", source, "--to", run) == 0
  assert _run("export", run, "--to", back) == 0
  found = safetensors_numpy.load_file(back / "model.safetensors")
  assert set(found) == {*tensors, head}
  np.testing.assert_array_equal(found[head], tensors["shared.weight"])


def test_several_files(tmp_path):
  source, run, back = (tmp_path / name for name in ("source", "run", "back"))
  tensors = _model(source, _config("llama2"))
  assert _run("import", source, "--to", run) == 0
  sizes = "--shard_bytes", "20000"
  assert _run("export", run, "--to", back, *sizes) == 0
  index = json.loads((back / "model.safetensors.index.json").read_text())
  total = sum(x.nbytes for x in tensors.values())
  assert index["metadata"]["total_size"] == total
  files = sorted(set(index["weight_map"].values()))
  assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
  assert len(files) > 2
  for file in files:
    found = safetensors_numpy.load_file(back / file)
    assert sum(x.nbytes for x in found.values()) <= 20000
    for name, x in found.items():
      assert index["weight_map"][name] == file
      np.testing.assert_array_equal(x, tensors[name])
  # And they are read again.
  again = tmp_path / "again"
  assert _run("import", back, "--to", again) == 0
  (back / files[1]).unlink()
  assert _run("import", back, "--to", tmp_path / "third") == 2


def test_dtypes_are_cast_on_request(tmp_path):
  source, run, back = (tmp_path / name for name in ("source", "run", "back"))
  tensors = _model(source, _config("llama2"))
  assert _run("import", source, "--to", run, "--dtype", "bfloat16") == 0
  stored = stored_checkpoint.find_checkpoint(epath.Path(run))
  name = "params/embedding/table"
  assert stored.arrays[name].dtype == "bfloat16"
  assert stored.arrays[name].axes == ("vocab", "embed")
  table = tensors["model.embed_tokens.weight"]
  np.testing.assert_array_equal(
    stored_checkpoint.read_numpy(stored, [name])[name],
    table.astype(jnp.bfloat16),
  )
  assert _run("export", run, "--to", back, "--dtype", "float16") == 0
  found = safetensors_numpy.load_file(back / "model.safetensors")
  np.testing.assert_array_equal(
    found["model.embed_tokens.weight"],
    table.astype(jnp.bfloat16).astype(np.float16),
  )
  assert json.loads((back / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize(
  "stated", [{"torch_dtype": "float16"}, {"dtype": None}, {}]
)
def test_the_configuration_states_the_dtype_of_the_weights(stated, tmp_path):
  source, run, back = (tmp_path / name for name in ("source", "run", "back"))
  config = _config("llama2", **stated)
  if "dtype" not in stated:
    config.pop("dtype", None)
  _model(source, config, dtype=jnp.bfloat16)
  assert _run("import", source, "--to", run, "--dtype", "float32") == 0
  assert _run("export", run, "--to", back) == 0
  for folder in (run / "hugging_face", back):
    found = json.loads((folder / "config.json").read_text())
    name = next(iter(stated), "dtype")
    assert found == {**config, name: "float32"}


def test_dry_run_writes_nothing(tmp_path, capsys):
  source, run = tmp_path / "source", tmp_path / "run"
  _model(source, _config("phi3"))
  assert _run("import", source, "--to", run, "--dry_run") == 0
  shown = capsys.readouterr().out
  assert "params/stack/layers/blocks_0/attention/query" in shown
  assert "model.layers.0.self_attn.qkv_proj.weight and 1 more" in shown
  assert "would write 12 arrays" in shown
  assert not run.exists()
  assert _run("import", source, "--to", run) == 0
  back = tmp_path / "back"
  capsys.readouterr()
  assert _run("export", run, "--to", back, "--dry_run") == 0
  assert "would write 15 tensors" in capsys.readouterr().out
  assert not back.exists()


def test_weights_that_do_not_fit(tmp_path, capsys):
  config, to = _config("llama2"), tmp_path / "run"
  missing = "model.layers.1.mlp.up_proj.weight"
  source = tmp_path / "missing"
  _model(source, config, leave_out=(missing,))
  line = _error(capsys, "import", source, "--to", to)
  assert f"{missing} [48, 32] is missing" in line
  source = tmp_path / "extra"
  _model(source, config, more={"model.adapter": np.zeros(3, np.float32)})
  line = _error(capsys, "import", source, "--to", to)
  assert "model.adapter is not part of the model" in line
  source = tmp_path / "shape"
  _model(source, config, more={missing: np.zeros((32, 32), np.float32)})
  line = _error(capsys, "import", source, "--to", to)
  assert f"{missing} has shape [32, 32], config.json needs [48, 32]" in line
  source = tmp_path / "dtypes"
  _model(source, config, more={missing: np.zeros((48, 32), np.float16)})
  line = _error(capsys, "import", source, "--to", to)
  assert "have several dtypes" in line
  assert "is F16" in line
  assert not to.exists()


def test_experts_that_do_not_fit(tmp_path, capsys):
  to = tmp_path / "run"
  _model(tmp_path / "count", _config("qwen3_moe"))
  for experts in (4, 8):
    config = _config("qwen3_moe", num_local_experts=experts)
    (tmp_path / "count" / "config.json").write_text(json.dumps(config))
    line = _error(capsys, "import", tmp_path / "count", "--to", to)
    assert f"they have 6 experts in a layer, config.json has {experts}" in line
  missing = "model.layers.2.mlp.experts.2.up_proj.weight"
  _model(tmp_path / "one", _config("qwen3_moe"), leave_out=(missing,))
  line = _error(capsys, "import", tmp_path / "one", "--to", to)
  assert f"{missing} [24, 32] is missing" in line
  config = _config("qwen3_moe", num_experts_per_tok=7)
  (tmp_path / "one" / "config.json").write_text(json.dumps(config))
  line = _error(capsys, "import", tmp_path / "one", "--to", to)
  assert (
    "num_experts_per_tok is 7; qwen3_moe supports only at most the number of"
    " experts (6)" in line
  )
  assert not to.exists()


_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def _packed(tensors):
  """Replaces the experts by random MXFP4; returns their values as well."""
  random = np.random.RandomState(0)
  stored = {k: x for k, x in tensors.items() if not k.endswith("_proj")}
  values = {}
  for name in set(tensors) - set(stored):
    experts, width, rows = tensors[name].shape
    shape = (experts, rows, width // 32)
    # All pairs of four bits occur.
    blocks = random.randint(0, 256, (*shape, 16)).astype(np.uint8)
    scales = random.randint(118, 130, shape).astype(np.uint8)
    stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
    bits = np.stack([blocks & 15, blocks >> 4], axis=-1)
    floats = bits.view(jnp.float4_e2m1fn).astype(np.float64)
    floats = floats.reshape(*shape, 32) * 2.0 ** (scales[..., None] - 127.0)
    values[name] = floats.reshape(experts, rows, width).swapaxes(1, 2)
  return stored, values


def test_mxfp4_is_read_as_its_values(tmp_path, capsys):
  source, run, back = (tmp_path / name for name in ("source", "run", "back"))
  config = _config("gpt_oss", dtype="bfloat16", quantization_config=_MXFP4)
  tensors = _model(source, config, dtype=jnp.bfloat16)
  stored, values = _packed(tensors)
  safetensors_numpy.save_file(stored, source / "model.safetensors")
  assert _run("import", source, "--to", run) == 0
  assert _run("export", run, "--to", back) == 0
  found = safetensors_numpy.load_file(back / "model.safetensors")
  assert set(found) == set(tensors)
  for name, x in tensors.items():
    assert found[name].dtype == jnp.bfloat16
    expected = values.get(name, x)
    # Bfloat16 represents all values.
    np.testing.assert_array_equal(found[name], expected.astype(jnp.bfloat16))
    np.testing.assert_array_equal(expected, found[name].astype(np.float64))
  written = json.loads((back / "config.json").read_text())
  assert written == {
    k: v for k, v in config.items() if k != "quantization_config"
  }


def test_mxfp4_that_does_not_fit(tmp_path, capsys):
  source, to = tmp_path / "source", tmp_path / "run"
  config = _config("gpt_oss", quantization_config=_MXFP4)
  stored, _ = _packed(_model(source, config))
  name = "model.layers.1.mlp.experts.down_proj"
  for changes, message in (
    ({f"{name}_scales": None}, f"{name}_blocks has no {name}_scales"),
    ({f"{name}_blocks": None}, f"{name}_scales has no {name}_blocks"),
    (
      {f"{name}_scales": np.zeros((6, 32, 2), np.uint8)},
      f"{name}_blocks has shape [6, 32, 1, 16] and {name}_scales [6, 32, 2]",
    ),
    (
      {f"{name}_scales": np.full((6, 32, 1), 255, np.uint8)},
      "weights must be finite",
    ),
  ):
    changed = {k: v for k, v in (stored | changes).items() if v is not None}
    safetensors_numpy.save_file(changed, source / "model.safetensors")
    assert message in _error(capsys, "import", source, "--to", to)
  # Other families have no such weights.
  _model(tmp_path / "llama", _config("llama2"))
  config = _config("llama2", quantization_config=_MXFP4)
  (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
  line = _error(capsys, "import", tmp_path / "llama", "--to", to)
  assert "quantization_config.quant_method is 'mxfp4'" in line


def test_tied_tensors_that_differ(tmp_path, capsys):
  source = tmp_path / "source"
  head = golden_case.weight("another", (64, 32))
  _model(source, _config("llama3"), more={"lm_head.weight": head})
  line = _error(capsys, "import", source, "--to", tmp_path / "run")
  assert "lm_head.weight differs from model.embed_tokens.weight" in line


def test_files_that_cannot_be_read(tmp_path, capsys):
  to, source = tmp_path / "run", tmp_path / "source"
  line = _error(capsys, "import", source, "--to", to)
  assert "does not exist" in line
  source.mkdir()
  line = _error(capsys, "import", source, "--to", to)
  assert "config.json is missing; it describes the model" in line
  (source / "config.json").write_text(json.dumps(_config("llama2")))
  (source / "pytorch_model.bin").write_bytes(b"")
  line = _error(capsys, "import", source, "--to", to)
  assert "No model.safetensors" in line
  assert "the format of pytorch_model.bin is not supported" in line
  cut = tmp_path / "cut"
  _model(cut, _config("llama2"))
  path = cut / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-8])
  line = _error(capsys, "import", cut, "--to", to)
  assert "model.safetensors cannot be read: it is truncated to" in line
  assert "copy it again" in line
  index = source / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
  line = _error(capsys, "import", source, "--to", to)
  assert "x.safetensors is missing" in line
  index.write_text("[]")
  line = _error(capsys, "import", source, "--to", to)
  assert "index.json cannot be read" in line
  assert not to.exists()


def _split(folder, tensors):
  """Writes tensors to two files with an index; returns the second."""
  files = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
  where = {name: files[i % 2] for i, name in enumerate(tensors)}
  for file in files:
    content = {name: x for name, x in tensors.items() if where[name] == file}
    safetensors_numpy.save_file(content, folder / file, metadata=_METADATA)
  index = folder / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": where}))
  (folder / "model.safetensors").unlink()
  return folder / files[1]


def test_a_tensor_in_two_files(tmp_path, capsys):
  source, to = tmp_path / "source", tmp_path / "run"
  tensors = _model(source, _config("llama2"))
  second = _split(source, tensors)
  content = safetensors_numpy.load_file(second)
  safetensors_numpy.save_file({**tensors, **content}, second)
  line = _error(capsys, "import", source, "--to", to)
  assert "lm_head.weight is in " in line
  assert "00001-of-00002.safetensors and in" in line
  assert "00002-of-00002.safetensors; delete one of them" in line


def test_one_file_beside_an_index(tmp_path, capsys):
  source, to = tmp_path / "source", tmp_path / "run"
  tensors = _model(source, _config("llama2"))
  single = source / "model.safetensors"
  content = single.read_bytes()
  _split(source, tensors)
  single.write_bytes(content)
  line = _error(capsys, "import", source, "--to", to)
  assert "has both model.safetensors and model.safetensors.index.json" in line
  assert _run("import", single, "--to", to) == 0


def test_pointers_of_git_lfs(tmp_path, capsys):
  source, to = tmp_path / "source", tmp_path / "run"
  _model(source, _config("llama2"))
  (source / "model.safetensors").write_text(
    "version https://git-lfs.github.com/spec/v1\n"
    f"oid sha256:{'0' * 64}\nsize 134\n"
  )
  line = _error(capsys, "import", source, "--to", to)
  assert "model.safetensors cannot be read: it is a pointer of Git LFS" in line
  assert "git lfs pull" in line


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8])
def test_integer_weights(dtype, tmp_path, capsys):
  source, to = tmp_path / "source", tmp_path / "run"
  name = "model.layers.1.mlp.up_proj.weight"
  more = {name: np.ones((48, 32), dtype)}
  _model(source, _config("llama2"), more=more)
  line = _error(capsys, "import", source, "--to", to)
  assert f"{name} has dtype " in line
  assert "must be of floating point" in line
  assert not to.exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_weights_that_are_not_finite(value, dtype, tmp_path, capsys):
  source, to = tmp_path / "source", tmp_path / "run"
  name = "model.layers.1.mlp.up_proj.weight"
  rows = np.ones((48, 32), dtype)
  rows[7, 3] = value
  _model(source, _config("llama2"), dtype=dtype, more={name: rows})
  line = _error(capsys, "import", source, "--to", to)
  assert f"{name}[7, 3] is {value}; weights must be finite" in line
  assert not (to / "checkpoints" / "0").exists()


def test_unsupported_models_are_rejected(tmp_path, capsys):
  source = tmp_path / "source"
  _model(source, _config("llama2"))
  for changes, message in (
    (
      {"model_type": "mamba"},
      "model_type 'mamba' is not supported",
    ),
    ({"quantization_config": {}}, "quantization_config is {}; llama supports"),
    ({"rope_scaling": {"type": "x"}}, "rope_scaling is {'type': 'x'}"),
    ({"rope_interleaved": True}, "rope_interleaved is True; llama supports"),
    (
      {"architectures": ["LlamaForSequenceClassification"]},
      "architectures is ['LlamaForSequenceClassification']",
    ),
  ):
    text = json.dumps(_config("llama2", **changes))
    (source / "config.json").write_text(text)
    line = _error(capsys, "import", source, "--to", tmp_path / "run")
    assert message in line


def test_wrong_use(tmp_path, capsys):
  assert "Unknown command 'improt'" in _error(capsys, "improt")
  assert "--to" in _error(capsys, "import", tmp_path)
  assert "invalid choice: 'int4'" in _error(
    capsys, "import", tmp_path, "--to", tmp_path / "x", "--dtype", "int4"
  )
  # What would reach such a store is not installed.
  missing = "az://a/b needs the package adlfs"
  assert missing in _error(capsys, "import", "az://a/b", "--to", tmp_path)
  missing = "az://a/b"
  assert missing in _error(capsys, "import", tmp_path, "--to", "az://a/b")
  assert _run("--help") == 0
  assert "Supported models: " in capsys.readouterr().out


def test_what_is_there_is_not_replaced(tmp_path, capsys):
  source, run = tmp_path / "source", tmp_path / "run"
  _model(source, _config("llama2"))
  assert _run("import", source, "--to", run) == 0
  capsys.readouterr()
  line = _error(capsys, "import", source, "--to", run)
  assert "checkpoints holds checkpoints; pass another folder" in line
  line = _error(capsys, "export", run, "--to", source)
  assert f"{source} holds weights; pass another folder" in line
  line = _error(
    capsys, "export", run, "--to", tmp_path / "y", "--shard_bytes", "0"
  )
  assert "--shard_bytes must be positive, got 0" in line
  line = _error(capsys, "export", run, "--to", "gs://bucket/model")
  assert line.startswith("gs://bucket/model")


def test_checkpoints_that_do_not_fit(tmp_path, capsys):
  source, run = tmp_path / "source", tmp_path / "run"
  _model(source, _config("llama2"))
  assert _run("import", source, "--to", run) == 0
  capsys.readouterr()
  other = tmp_path / "other"
  _model(other, _config("llama2", vocab_size=65))
  line = _error(capsys, "export", run, "--like", other, "--to", tmp_path / "x")
  assert (
    "params/embedding/table has shape (64, 32) in the checkpoint and (65, 32)"
    in line
  )
  shutil.rmtree(run / "hugging_face")
  line = _error(capsys, "export", run, "--to", tmp_path / "x")
  assert "pass --like=FOLDER" in line


def test_files_are_filled_in_order():
  shape = np.float32, (10,)
  described = {"a": shape, "b": shape, "c": (np.float32, (100,)), "d": shape}
  assert hf_export.plan(described, shard_bytes=80) == {
    "model-00001-of-00003.safetensors": ["a", "b"],
    "model-00002-of-00003.safetensors": ["c"],
    "model-00003-of-00003.safetensors": ["d"],
  }
  assert hf_export.plan(described, shard_bytes=10_000) == {
    "model.safetensors": ["a", "b", "c", "d"]
  }


class _PeakMemory:
  """Samples this process's memory in use; `growth` in bytes after the end."""

  def __enter__(self):
    self._begin = self._peak = self._now()
    self._done = threading.Event()
    self._thread = threading.Thread(target=self._sample)
    self._thread.start()
    return self

  def __exit__(self, *exception):
    self._done.set()
    self._thread.join()
    self.growth = self._peak - self._begin

  def _sample(self):
    while not self._done.wait(0.002):
      self._peak = max(self._peak, self._now())

  @staticmethod
  def _now():
    with open("/proc/self/statm") as file:
      return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_model(tmp_path):
  # Layers without a pattern are no stack: many small arrays.
  config = _config(
    "qwen2",
    num_hidden_layers=8,
    layer_types=None,
    max_window_layers=4,
    hidden_size=512,
    intermediate_size=1024,
    num_key_value_heads=4,
  )
  small, large = tmp_path / "small", tmp_path / "large"
  _model(small, {**config, "num_hidden_layers": 3, "max_window_layers": 2})
  total = sum(x.nbytes for x in _model(large, config).values())
  assert total > 80e6
  # What is allocated once, such as the buffers of readers.
  assert _run("import", small, "--to", tmp_path / "run") == 0
  assert _run("export", tmp_path / "run", "--to", tmp_path / "back") == 0
  with _PeakMemory() as importing:
    assert _run("import", large, "--to", tmp_path / "run2") == 0
  with _PeakMemory() as exporting:
    assert _run("export", tmp_path / "run2", "--to", tmp_path / "back2") == 0
  assert importing.growth < 48e6
  assert exporting.growth < 48e6
