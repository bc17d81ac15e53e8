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

from paxon.layers.models.hugging_face import families, testing
from paxon.quantization import number_formats, served_einsum
from paxon.runner.checkpoints import stored_checkpoint
from paxon.tools import hf_files
from paxon.tools.hf_goldens import imported_models

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
  ids = np.random.default_rng(0).integers(3, 250, (2, 20)).astype(np.int32)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    os.fspath(out), dtype=torch.float32
  ).eval()
  with torch.no_grad():
    expected = model(torch.from_numpy(ids).long()).logits.numpy()
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
  logits = of.model(config).apply(weights, *testing.token_args(ids))
  np.testing.assert_allclose(logits, expected, rtol=0, atol=_TOLERANCE)
