r"""Imported Hugging Face models, to train further and to generate text.

  tools/hf import Qwen3-0.6B --to runs/qwen3 --dtype float32
  tools/python -m paxon.runner.main --mode=decode --job_log_dir=runs/qwen3 \
      --exp=tasks.lm.params.hugging_face.HuggingFaceLm \
      --fdl.weights=runs/qwen3

The imported `config.json` defines the architecture.
"""

from collections.abc import Mapping
import json
import os
from typing import Any

from etils import epath
import fiddle as fdl

from paxon.layers import softmax_loss
from paxon.layers.models.hugging_face import families, family
from paxon.learners import adamw, learner, schedules
from paxon.runner import experiment, run_dir, user_error
from paxon.runner import task as task_lib
from paxon.runner.settings import training
from paxon.tasks.lm import lm_data

_FOLDER = "hugging_face"
_CONFIG = f"{_FOLDER}/config.json"
# A toy, to try the experiment without weights.
_TOY: Mapping[str, Any] = {
  "model_type": "llama",
  "vocab_size": 264,
  "hidden_size": 64,
  "intermediate_size": 128,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "tie_word_embeddings": True,
}
_DECODERS = ("ForCausalLM", "LMHeadModel")


class HuggingFaceLm(lm_data.Text, experiment.Experiment):
  """Continued training of a decoder imported by `tools/hf import`.

  Without `weights` it is a randomly initialized toy. Tokens are bytes, as in
  other text experiments, so a model trained with another tokenizer has to learn
  them first.

  Attributes:
    weights: Folder created by `tools/hf import`, with the architecture and the
      initial weights.
    learning_rate: Peak learning rate.
    warmup_steps: Warmup steps of the learning rate.
    weight_decay: Decoupled weight decay, multiplied by the learning rate.
    loss_chunk_length: Positions per chunk of the loss; None computes all at
      once.
  """

  num_train_steps = 1000
  global_batch_size = 8
  checkpoint_every_steps = 500
  eval_every_steps = 500
  summary_every_steps = 10

  length = 512
  weights: str | None = None
  learning_rate: float = 1e-5
  warmup_steps: int = 50
  weight_decay: float = 0.0
  loss_chunk_length: int | None = 256
  prompts = ("The ", "def ")
  max_new_tokens = 128

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the imported model and its learner."""
    model = self._model()
    model.token_loss = fdl.Config(
      softmax_loss.SoftmaxLoss, chunk_length=self.loss_chunk_length
    )
    optimizer = fdl.Config(
      adamw.AdamW,
      schedule=fdl.Config(
        schedules.WarmupCosine,
        peak=self.learning_rate,
        warmup_steps=min(self.warmup_steps, self.num_train_steps),
        total_steps=self.num_train_steps,
        end=0.1 * self.learning_rate,
      ),
      b2=0.95,
      weight_decay=self.weight_decay,
    )
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=model,
      learner=fdl.Config(
        learner.Learner, optimizer=optimizer, max_grad_norm=1.0
      ),
      **self.of_data(),
    )

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns the imported checkpoint."""
    if self.weights is None:
      return None
    # Parameters are float32, for any dtype of the files.
    return fdl.Config(training.WarmStart, checkpoint=self.weights, cast=True)

  def run_files(self) -> dict[str, str]:
    """Returns the files of the model, with which a run can be exported."""
    if self.weights is None:
      return {}
    return {_FOLDER: f"{self.weights}/{_FOLDER}"}

  def shrink(self) -> Any:
    """Returns a toy-sized version without weights."""
    return (
      super()
      .shrink()
      .replace(
        weights=None,
        length=64,
        global_batch_size=8,
        loss_chunk_length=None,
        max_new_tokens=8,
      )
    )

  def _model(self) -> fdl.Config[Any]:
    config, of = _TOY, families.find(_TOY)
    if self.weights is not None:
      config, of = _read(self.weights)
    try:
      return of.model(config, fdl.Config)
    except family.UnsupportedConfigError as error:
      raise user_error.UserError(str(error)) from error


def _read(weights: str) -> tuple[Mapping[str, Any], family.Family]:
  """Returns the configuration of imported weights and its family."""
  path = run_dir.resolve(weights, os.environ) / epath.Path(_CONFIG)
  try:
    config = json.loads(path.read_text())
    of = families.find(config)
  except (OSError, ValueError) as error:
    raise user_error.UserError(
      f"HuggingFaceLm.weights is {weights!r}, and {os.fspath(path)} cannot be"
      f" used ({error}); give the folder that `tools/hf import` has made."
    ) from error
  if not of.architecture.endswith(_DECODERS):
    raise user_error.UserError(
      f"HuggingFaceLm.weights is {weights!r}, a {of.architecture}; this"
      " experiment is for decoders alone."
    )
  return config, of
