"""All imported decoders against their goldens, and exports in transformers.

Skipped where torch is not installed.
"""

import importlib.util
import os

from etils import epath
from flax import traverse_util
import jax
import numpy as np
import pytest

from paxon.layers.models.hugging_face import families, testing
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
