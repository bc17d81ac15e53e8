"""Imported models generate, evaluate and train as transformers does."""

import json
import os
import re

from etils import epath
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from paxon.inputs.tokenizers import load
from paxon.layers.models.hugging_face import families
from paxon.quantization import number_formats, served_einsum
from paxon.runner import user_error
from paxon.runner.checkpoints import stored_checkpoint
from paxon.tasks.lm.params import hugging_face
from paxon.tools.hf_goldens import imported_models
from paxon.tools.hugging_face import hf_main
from paxon.tools.lm_evaluation import lm_eval_model

_DOWN = "params/stack/layers_2/feed_forward/down"


# All others in `oracle_test`.
@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_equals_transformers(name, tmp_path, capsys):
  run, tuned = imported_models.check(tmp_path, name)
  # The run can be used from any directory.
  settings = json.loads((tuned / "settings.json").read_text())
  (weights,) = (
    each.partition("=")[2]
    for each in settings["overrides"]
    if each.startswith("--fdl.weights=")
  )
  assert os.path.isabs(weights)
  assert os.path.samefile(weights, run)
  for source, target in ((run, "same"), (tuned, "tuned_export")):
    to = os.fspath(tmp_path / target)
    imported_models.convert("export", os.fspath(source), "--to", to)
  original, same, trained = (
    safetensors.load_file(tmp_path / folder / "model.safetensors")
    for folder in ("original", "same", "tuned_export")
  )
  assert original.keys() == same.keys() == trained.keys()
  for key, value in original.items():
    np.testing.assert_array_equal(same[key], value)
    assert np.isfinite(trained[key]).all()
  assert any((trained[key] != value).any() for key, value in original.items())
  # With it, transformers can use the exported folder.
  for each in ("config.json", "tokenizer.json", "tokenizer_config.json"):
    assert (tmp_path / "tuned_export" / each).exists()
  if name == "qwen3":
    recipe = "int4_gptq"
    served, out = imported_models.export_quantized(tmp_path, tuned, recipe)
    _check_packed(served, out)
    _check_imported(served, out, rtol=1e-6)
    out = tmp_path / "gptq"
    arguments = "export", os.fspath(served), "--to", os.fspath(out)
    imported_models.convert(*arguments, "--format=gptq")
    _check_gptq(served, out)
    # The scales are float16.
    _check_imported(served, out, rtol=2**-11)
  else:
    with pytest.raises(AssertionError):
      imported_models.export_quantized(tmp_path, tuned, "int8")
    printed = capsys.readouterr().err
    assert "int8 is not a recipe of int4 weights" in printed
    arguments = "export", os.fspath(run), "--to", os.fspath(tmp_path / "none")
    with pytest.raises(AssertionError):
      imported_models.convert(*arguments, "--format=gptq")
    assert (
      "has no quantized weights, so --format=gptq" in capsys.readouterr().err
    )


def _check_packed(served, exported):
  """Compares a packed export with the stored weights, by the definition."""
  tensors = safetensors.load_file(exported / "model.safetensors")
  config = json.loads((exported / "config.json").read_text())
  described = config.pop("quantization_config")
  assert described["format"] == "pack-quantized"
  (group,) = described["config_groups"].values()
  size = group["weights"]["group_size"]
  assert described["ignore"] == ["lm_head"]
  stem, expected = _find_weight(served, config)
  shape = tensors[f"{stem}.weight_shape"]
  packed = tensors[f"{stem}.weight_packed"].view(np.uint32)
  codes = np.stack([packed >> 4 * i & 15 for i in range(8)], axis=-1)
  codes = codes.reshape(shape).astype(np.float32) - 8
  found = codes * np.repeat(tensors[f"{stem}.weight_scale"], size, axis=1)
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  assert f"{stem}.weight" not in tensors


def _check_gptq(served, exported):
  """The same for the format of GPTQ, as AutoGPTQ unpacks it."""
  tensors = safetensors.load_file(exported / "model.safetensors")
  config = json.loads((exported / "config.json").read_text())
  described = config.pop("quantization_config")
  assert described["quant_method"] == described["checkpoint_format"] == "gptq"
  stem, expected = _find_weight(served, config)
  packed, zeros = (
    tensors[f"{stem}.{name}"].view(np.uint32) for name in ("qweight", "qzeros")
  )
  codes = np.stack([packed >> 4 * i & 15 for i in range(8)], axis=1)
  codes = codes.reshape(-1, packed.shape[1]).astype(np.int32)
  zeros = np.stack([zeros >> 4 * i & 15 for i in range(8)], axis=-1)
  zeros = zeros.reshape(len(zeros), -1).astype(np.int32) + 1
  groups, scales = tensors[f"{stem}.g_idx"], tensors[f"{stem}.scales"]
  assert np.bincount(groups).tolist() == (
    [described["group_size"]] * scales.shape[0]
  )
  found = scales.astype(np.float32)[groups] * (codes - zeros[groups])
  # The scales are float16.
  np.testing.assert_allclose(found.T, expected, rtol=2**-11)
  assert f"{stem}.weight" not in tensors


def _check_imported(served, exported, *, rtol):
  """Compares an import of quantized weights with those that are served."""
  run = exported.with_name(f"{exported.name}_imported")
  imported_models.convert("import", os.fspath(exported), "--to", os.fspath(run))
  stored = stored_checkpoint.find_checkpoint(epath.Path(served))
  expected = stored_checkpoint.read_numpy(stored, list(stored.variables()))
  config = json.loads((run / "hugging_face" / "config.json").read_text())
  assert "quantization_config" not in config
  leaves = families.find(config).names(config).leaves
  found = stored_checkpoint.read_numpy(
    stored_checkpoint.find_checkpoint(epath.Path(run)), list(leaves)
  )
  kernels = 0
  for name in stored.variables():
    parameter = served_einsum.stored_parameter(name)
    if parameter is None:
      if name in leaves:
        np.testing.assert_array_equal(found[name], expected[name])
      continue
    kernels += 1
    weights = served_einsum.dequantize(
      jnp.asarray(expected[name]),
      jnp.asarray(expected[name.removesuffix("values") + "scale"]),
      number_format=number_formats.INT4,
      layer_shape=leaves[parameter].shape,
    )
    np.testing.assert_allclose(
      found[parameter], np.asarray(weights), rtol=rtol, err_msg=parameter
    )
  assert kernels > 6


def _find_weight(served, config):
  """Returns a layer and its weight [outputs, inputs] from the stored values."""
  stored = stored_checkpoint.find_checkpoint(epath.Path(served))
  leaf = families.find(config).names(config).leaves[_DOWN]
  at = served_einsum.COLLECTION + _DOWN.removeprefix("params").replace(
    "/down", "/einsum/down"
  )
  names = [f"{at}/values", f"{at}/scale"]
  values, scale = stored_checkpoint.read_numpy(stored, names).values()
  weights = served_einsum.dequantize(
    jnp.asarray(values),
    jnp.asarray(scale),
    number_format=number_formats.INT4,
    layer_shape=leaf.shape,
  )
  ((name, _, expected, _),) = leaf.to_tensors(np.asarray(weights))
  return name.removesuffix(".weight"), expected


def test_learned_positions_limit_generation(tmp_path):
  """The golden is of transformers, for the first rows of the same table."""
  golden = imported_models.read_goldens()["gpt2"]
  folder = imported_models.FOLDER / imported_models.TOKENIZERS["gpt2"]
  size = len(load.load(os.fspath(folder)).encode_prompt(imported_models.PROMPT))
  # Fewer than to which prompts of a file are padded, and than 128.
  positions = size + 7
  assert size < positions < 32
  run = imported_models.import_model(
    tmp_path, "gpt2", {**golden["config"], "n_positions": positions}
  )
  file = tmp_path / "prompts.jsonl"
  longer = {"prompt": f"{imported_models.PROMPT}!"}
  decode = ("--mode=decode", f"--job_log_dir={run}")
  prompt = (*decode, f"--prompt={imported_models.PROMPT}")
  lines = (*decode, f"--decode_file={file}")
  weights = run / "checkpoints"
  weights.rename(run / "moved")  # No error needs them.
  needed = (
    rf"^A prompt of {size} tokens and 9 new ones need {positions + 1} positions"
    rf" \(the last token needs none\), and the model has {positions}; set"
    " max_new_tokens to at most 8, or shorten the prompt.$"
  )
  messages = json.dumps([{"role": "user", "content": "x" * 50}])
  file.write_text("\n".join(map(json.dumps, ({"prompt": "a"}, longer))))
  for command, message in (
    ((*prompt, "--fdl.max_new_tokens=9"), needed),
    ((*prompt, "--fdl.max_new_tokens=9", "--fdl.beam_size=2"), needed),
    ((*prompt, "--fdl.max_new_tokens=9", "--fdl.draft_tokens=2"), needed),
    (
      (*decode, "--chat", f"--prompt={messages}"),
      rf"^A prompt of \d\d tokens .* the model has {positions}; shorten the",
    ),
    (
      (*lines, "--fdl.max_new_tokens=8"),
      rf"^--decode_file, line 2: A prompt of {size + 1} tokens and 8 new ones",
    ),
    (
      (
        *("--mode=infer", *decode[1:], "--fdl.documents=python_stdlib"),
        f"--fdl.length={positions}",
        "--fdl.eval_inputs.validation.length=64",
      ),
      rf"^The split 'validation' has sequences of 64 tokens .* {positions} pos",
    ),
  ):
    printed = imported_models.call(*command, status=2).splitlines()
    assert re.search(message, printed[-1]), printed
  with pytest.raises(
    user_error.UserError, match=f"--max_length must be at most {positions}, the"
  ):
    lm_eval_model.open_run(os.fspath(run), max_length=positions + 1)
  (run / "moved").rename(weights)
  file.write_text(json.dumps({"prompt": imported_models.PROMPT}))
  for i, command in enumerate((lines, (*prompt, "--fdl.draft_tokens=3"))):
    imported_models.call(*command, "--fdl.max_new_tokens=8")
    name = "0-prompts.jsonl" if not i else "0.jsonl"
    line = json.loads((run / "decode" / name).read_text())
    assert len(line["ids"]) == 8
    text = line["prompt"] + line["continuation"]
    assert golden["text"].startswith(text)
  # Their default fits, too.
  imported_models.call(*decode, "--prompt=a")


def test_only_the_ids_that_occur_must_fit(tmp_path, capsys):
  config = imported_models.read_goldens()["qwen3"]["config"]
  folder = imported_models.FOLDER / imported_models.TOKENIZERS["qwen3"]
  last = load.load(os.fspath(folder)).vocab_size - 1
  token = load.load(os.fspath(folder)).decode([last])
  name = load.load(os.fspath(folder)).find_token(last)
  imported_models.write(
    tmp_path / "original", "qwen3", config | {"vocab_size": last}
  )
  run = tmp_path / "run"
  capsys.readouterr()
  arguments = "import", f"{tmp_path}/original", "--to", os.fspath(run)
  assert hf_main.main(arguments) == 0
  assert (
    f"the tokenizer has {last + 1} ids, the embedding {last}: texts with ids"
    f" from {last} are rejected where they occur" in capsys.readouterr().out
  )
  train_file = tmp_path / "train.jsonl"
  commands = (
    ("--mode=decode", f"--job_log_dir={run}", f"--prompt=a{token}"),
    ("--mode=eval", f"--job_log_dir={run}", f"--eval_file={train_file}"),
    (
      f"--exp={hugging_face.HuggingFaceLm.import_path()}",
      *(f"--fdl.weights={run}", f"--fdl.train_files={train_file}"),
      *(f"--job_log_dir={tmp_path}/trained", "--fdl.num_train_steps=1"),
      *("--fdl.prompts=('a',)", "--fdl.max_new_tokens=2"),
      *("--fdl.length=16", "--fdl.global_batch_size=8"),
    ),
  )
  train_file.write_text(json.dumps({"text": f"ab{token}"}) + "\n")
  for command in commands:
    printed = imported_models.call(*command, status=2)
    assert (
      f"has the token {name!r}, whose id {last} the model does not embed: it"
      f" has {last} ids" in printed.splitlines()[-1]
    )
  train_file.write_text(json.dumps({"text": "abcdefgh" * 9}) + "\n")
  imported_models.call(*commands[2])


def test_a_damaged_tokenizer_is_one_clear_error(tmp_path):
  config = imported_models.read_goldens()["qwen3"]["config"]
  run = imported_models.import_model(tmp_path, "qwen3", config)
  decode = ("--mode=decode", f"--job_log_dir={run}", "--prompt=a fox")
  evaluate = ("--mode=eval", f"--job_log_dir={run}", f"--eval_file={__file__}")
  train = (
    f"--exp={hugging_face.HuggingFaceLm.import_path()}",
    f"--fdl.weights={run}",
    f"--fdl.train_files={tmp_path}/train.jsonl",
    f"--job_log_dir={tmp_path}/trained",
  )
  commands = decode, (*decode, "--chat"), evaluate, train
  tokenizer = run / "hugging_face" / "tokenizer.json"
  tokenizer.write_text("{")
  for command in commands:
    printed = imported_models.call(*command, status=2)
    assert f"{tokenizer} is not JSON" in printed
  tokenizer.unlink()
  for command in commands:
    printed = imported_models.call(*command, status=2)
    assert f"{run}/hugging_face" in printed
    assert "--fdl.tokenizer=PATH" in printed
