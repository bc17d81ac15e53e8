"""All imported decoders against their goldens, and exports in transformers.

Run as `imported_models_oracle_test`, and skipped where torch is not installed.
"""

import importlib.util
import json
import math
import os

import pytest

from paxon.tasks.lm.params import imported_models

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec("torch") is None
    or importlib.util.find_spec("transformers") is None,
    reason="torch and transformers are not here; --config=oracle brings them",
  ),
  pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("name", sorted(imported_models.TOKENIZERS))
def test_equals_transformers(name, tmp_path):
  import transformers  # pyrefly: ignore[missing-import]

  from paxon.tasks.lm.params import make_imported_goldens

  _, tuned = imported_models.check(tmp_path, name)
  out = os.fspath(tmp_path / "exported")
  imported_models.convert("export", os.fspath(tuned), "--to", out)
  model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  nll, tokens = make_imported_goldens.score(
    model, tokenizer(imported_models.TEXT).input_ids
  )
  imported_models.call(
    *("--mode=eval", f"--job_log_dir={tuned}"),
    f"--eval_file={tmp_path}/text.txt",
  )
  result = json.loads((tuned / "eval" / "files.jsonl").read_text())
  assert result["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-4)
