"""All imported decoders against their goldens, and exports in transformers.

Skipped where torch is not installed.
"""

import importlib.util
import os

from etils import epath
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import testing
from paxon.quantization import number_formats, served_einsum
from paxon.runner.checkpoints import stored_checkpoint
from paxon.tasks.lm.params import hugging_face
from paxon.tools.hf_goldens import imported_models
from paxon.tools.hugging_face import hf_files

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec("torch") is None
    or importlib.util.find_spec("transformers") is None,
    reason="torch and transformers are not here; --config=oracle brings them",
  ),
  pytest.mark.filterwarnings("ignore"),
]
# Between float32 programs, for logits of size one.
_TOLERANCE = 1e-4


def _logits(run, ids):
  """Returns the logits of the newest checkpoint of a run, [B,T,V]."""
  config = hf_files.read_config(epath.Path(run) / hf_files.FOLDER)
  of = families.find(config)
  stored = stored_checkpoint.find_checkpoint(epath.Path(run))
  names = list(of.names(config).leaves)
  arrays = stored_checkpoint.read_numpy(stored, names)
  weights = traverse_util.unflatten_dict(
    {name: jax.device_put(x) for name, x in arrays.items()}, sep="/"
  )
  return of.model(config).apply(weights, *testing.token_args(ids))


@pytest.mark.parametrize("name", sorted(imported_models.TOKENIZERS))
def test_equals_transformers(name, tmp_path):
  import torch  # pyrefly: ignore[missing-import]
  import transformers  # pyrefly: ignore[missing-import]

  tokenizer = transformers.AutoTokenizer.from_pretrained(
    imported_models.FOLDER / imported_models.TOKENIZERS[name]
  )
  ids = tokenizer(imported_models.TEXT, return_tensors="np").input_ids
  ids = ids.astype(np.int32)[:, : 2 * imported_models.LENGTH]
  runs = imported_models.check(tmp_path, name)
  found = []
  for i, run in enumerate(runs):
    out = os.fspath(tmp_path / f"exported_{i}")
    imported_models.convert("export", os.fspath(run), "--to", out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
      expected = model(torch.from_numpy(ids).long()).logits.numpy()
    found.append(expected)
    np.testing.assert_allclose(
      _logits(run, ids), expected, rtol=0, atol=_TOLERANCE
    )
  # Training has changed the model.
  assert np.abs(found[1] - found[0]).max() > 100 * _TOLERANCE


@pytest.mark.skipif(
  importlib.util.find_spec("compressed_tensors") is None,
  reason="compressed_tensors is not here; --config=oracle brings it",
)
@pytest.mark.parametrize("recipe", ["int4_group", "int4_gptq"])
def test_quantized_weights_are_read_by_transformers(recipe, tmp_path):
  # Transformers imports it for these files.
  import compressed_tensors  # noqa: F401  # pyrefly: ignore[missing-import]
  import torch  # pyrefly: ignore[missing-import]
  import transformers  # pyrefly: ignore[missing-import]

  _, tuned = imported_models.check(tmp_path, "llama2")
  served, out = imported_models.export_quantized(tmp_path, tuned, recipe)
  ids = _random_ids()
  model = transformers.AutoModelForCausalLM.from_pretrained(
    os.fspath(out), dtype=torch.float32
  ).eval()
  with torch.no_grad():
    expected = model(torch.from_numpy(ids).long()).logits.numpy()
  np.testing.assert_allclose(
    _served_logits(served, out, ids), expected, rtol=0, atol=_TOLERANCE
  )


@pytest.mark.skipif(
  importlib.util.find_spec("auto_round") is None,
  reason="auto_round is not here; --config=oracle brings it",
)
def test_gptq_folders_are_read_by_auto_round(tmp_path):
  """In layers whose sizes are multiples of 32, as its CPU backend asks."""
  # Transformers imports it for these files.
  import auto_round  # noqa: F401  # pyrefly: ignore[missing-import]
  import torch  # pyrefly: ignore[missing-import]
  import transformers  # pyrefly: ignore[missing-import]

  config = imported_models.read_goldens()["llama2"]["config"]
  sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
  run = imported_models.import_model(tmp_path, "llama2", config | sizes)
  tuned = tmp_path / "tuned"
  knobs = {**imported_models.KNOBS, "prompts": None, "max_new_tokens": None}
  imported_models.call(
    f"--exp={hugging_face.HuggingFaceLm.import_path()}",
    f"--job_log_dir={tuned}",
    f"--fdl.weights={run}",
    f"--fdl.train_files={tmp_path}/train.jsonl",
    *(f"--fdl.{name}={value}" for name, value in knobs.items()),
  )
  served, out = imported_models.export_quantized(
    tmp_path, tuned, "int4_gptq", "--format=gptq"
  )
  load = transformers.AutoModelForCausalLM.from_pretrained
  read = load(
    os.fspath(out),
    device_map="cpu",
    quantization_config=transformers.AutoRoundConfig(backend="torch"),
  )
  # It rounds all other weights to float16, so they are read here.
  plain = transformers.AutoConfig.from_pretrained(
    os.fspath(tmp_path / "original")
  )
  model = transformers.AutoModelForCausalLM.from_config(plain).eval()
  exported = safetensors.load_file(out / "model.safetensors")
  model.load_state_dict(
    {name: torch.from_numpy(x) for name, x in exported.items()}, strict=False
  )
  count = 0
  for name, module in read.named_modules():
    if type(module).__name__ == "QuantLinear":
      # Otherwise what is multiplied by them is rounded to float16, too.
      module.scales = module.scales.float()
      model.set_submodule(name, module)
      count += 1
  assert count == 7 * config["num_hidden_layers"]
  ids = _random_ids()
  with torch.no_grad():
    expected = model(torch.from_numpy(ids).long()).logits.numpy()
  # The scales in the files are float16.
  error = np.linalg.norm(_served_logits(served, out, ids) - expected)
  assert error < 1e-3 * np.linalg.norm(expected)


def _random_ids():
  return np.random.default_rng(0).integers(3, 250, (2, 20)).astype(np.int32)


def _served_logits(served, out, ids):
  """Returns our logits with the stored weights, dequantized."""
  config = dict(hf_files.read_config(epath.Path(out)))
  del config["quantization_config"]
  of = families.find(config)
  stored = stored_checkpoint.find_checkpoint(epath.Path(served))
  names = list(stored.variables())
  arrays = stored_checkpoint.read_numpy(stored, names)
  values = {k: v for k, v in arrays.items() if k.startswith("params/")}
  for name, scale in arrays.items():
    if name.startswith("served/") and name.endswith("/scale"):
      kernel = name.removeprefix("served").removesuffix("/scale")
      kernel = "params" + kernel.replace("/einsum/", "/")
      values[kernel] = served_einsum.dequantize(
        jnp.asarray(arrays[name.removesuffix("scale") + "values"]),
        jnp.asarray(scale),
        number_format=number_formats.INT4,
        layer_shape=of.names(config).leaves[kernel].shape,
      )
  weights = traverse_util.unflatten_dict(
    {name: jax.device_put(x) for name, x in values.items()}, sep="/"
  )
  return of.model(config).apply(weights, *testing.token_args(ids))
