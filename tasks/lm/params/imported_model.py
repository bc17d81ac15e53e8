"""A tiny decoder as `tools/hf import` writes one, for tests, and its programs.

`python -m` this module forks processes that compute log probabilities.
"""

import json
import os
import signal
from typing import Any
from unittest import mock

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs import teacher_input
from paxon.inputs.tokenizers import make_chat_goldens
from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.runner.checkpoints import checkpointer
from paxon.runner.hosts import testing as forks_lib
from paxon.sharding import arrays, variables
from paxon.tasks.lm.params import reference_log_probs, teacher_log_probs

CONFIG = {
  "model_type": "qwen3",
  "vocab_size": 264,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 1,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "tie_word_embeddings": True,
}
TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n"
  "{{ m.content }}<|im_end|>{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(
  folder: Any, config: dict[str, Any] = CONFIG, scale: float = 1.0
) -> dict[str, Any]:
  """Writes what `tools/hf import` writes, with a tokenizer and a template."""
  own = folder / "hugging_face"
  own.mkdir(parents=True)
  (own / "config.json").write_text(json.dumps(config))
  make_chat_goldens.write_tokenizer(own)
  names = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
  (own / "tokenizer_config.json").write_text(json.dumps(names))
  found = families.find(config).names(config)

  def read_rows(name: str, start: int, stop: int) -> np.ndarray:
    shape = found.tensors[name].shape
    return scale * golden_case.weight(name, shape)[start:stop]

  tree = {
    name: leaf.from_tensors(read_rows) for name, leaf in found.leaves.items()
  }
  tree["step"] = np.zeros((), np.int32)
  specs = {
    name: variables.VariableSpec(name, x.shape, x.dtype, (None,) * x.ndim)
    for name, x in tree.items()
  }
  with checkpointer.Checkpointer(
    epath.Path(folder / "checkpoints")
  ) as checkpoints:
    arrays = jax.tree.map(jnp.asarray, tree)
    checkpoints.save(0, arrays, specs=specs, data={})
  return tree


def write_pairs(path: Any) -> None:
  """Writes eight pairs of answers."""
  rows = [
    {"prompt": f"{a} + 1?", "chosen": f"{a + 1}", "rejected": f"{a}."}
    for a in range(8)
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def log_probs(arguments: list[str]) -> int:
  """Runs `reference_log_probs` or `teacher_log_probs`.

  Args:
    arguments: Which of them; the number of batches before which the process is
      killed, 0 for never; and the arguments.
  """
  name, limit, *rest = arguments
  left = [None] * int(limit)

  def split_or_die(*args: Any) -> Any:
    if limit != "0":
      if not left:
        os.kill(os.getpid(), signal.SIGKILL)
      left.pop()
    return split(*args)

  split = arrays.split_batch
  with (
    mock.patch.object(arrays, "split_batch", split_or_die),
    # What is done is saved after each batch.
    mock.patch.object(teacher_input, "SAVE_SECONDS", 0.0),
    mock.patch.object(reference_log_probs, "SAVE_SECONDS", 0.0),
  ):
    mains = {
      "reference": reference_log_probs.main,
      "teacher": teacher_log_probs.main,
    }
    return mains[name](rest)


if __name__ == "__main__":
  forks_lib.serve({log_probs.__name__: log_probs})
