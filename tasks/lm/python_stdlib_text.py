"""Base of experiments on the source code of Python's standard library.

The text needs no download: it is that of the interpreter.
"""

import abc
import math
from typing import Any

import fiddle as fdl

from paxon.inputs import packed_input, text_baselines
from paxon.inputs.sources import python_stdlib
from paxon.layers import embedding
from paxon.learners import learner, metrics, schedules
from paxon.learners.optimizers import adamw
from paxon.runner import experiment
from paxon.runner import task as task_lib
from paxon.tasks.lm import tokenized


class PythonStdlibText(tokenized.Tokenized, experiment.Experiment):
  """Bytes of 11 MB of Python source code; subclasses define the model.

  Attributes:
    length: Sequence length in bytes.
    num_layers: Number of layers.
    embed_dim: Width of the residual stream.
    scan_layers: Whether the program loops over the layers.
    peak_learning_rate: Peak learning rate.
    warmup_steps: Warmup steps of the learning rate.
    weight_decay: Decoupled weight decay, multiplied by the learning rate.
  """

  num_train_steps = 1000
  global_batch_size = 8
  checkpoint_every_steps = 200
  eval_every_steps = 500
  summary_every_steps = 20

  length: int = 256
  num_layers: int
  embed_dim: int = 128
  scan_layers: bool = True
  peak_learning_rate: float = 4e-3
  warmup_steps: int = 50
  weight_decay: float = 0.1
  # Prompt and new tokens must fit into `length`: a model of this size does not
  # generalize to positions that it was not trained on.
  max_new_tokens = 240
  prompts = ("def ", "class ", "import ")
  temperature = 0.7
  top_k = 40

  @abc.abstractmethod
  def model(self) -> fdl.Config[Any]:
    """Returns the model."""

  def embedding(self) -> fdl.Config[Any]:
    """Returns the token embedding, which is also the head."""
    return fdl.Config(
      embedding.Embedding,
      vocab_size=self.find_vocab_size(),
      embed_dim=self.embed_dim,
      input_scale=math.sqrt(self.embed_dim),
    )

  def optimizer(self) -> fdl.Config[Any]:
    """Returns AdamW with a warmup and a cosine."""
    return fdl.Config(
      adamw.AdamW,
      schedule=self.schedule(self.peak_learning_rate),
      b2=0.99,
      weight_decay=self.weight_decay,
    )

  def schedule(self, peak: float) -> fdl.Config[Any]:
    """Returns a learning rate that rises to `peak` and decays to 5 % of it."""
    return fdl.Config(
      schedules.WarmupCosine,
      peak=peak,
      warmup_steps=min(self.warmup_steps, self.num_train_steps),
      total_steps=self.num_train_steps,
      end=0.05 * peak,
    )

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model and its learner."""
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=self.model(),
      learner=fdl.Config(
        learner.Learner, optimizer=self.optimizer(), max_grad_norm=1.0
      ),
      metrics=(metrics.bits_per_byte,),
      tokenizer=self.make_tokenizer(),
    )

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns endless training text and one epoch of held-out files."""
    shared = {
      "tokenizer": self.make_tokenizer(),
      "length": self.length,
    }
    return {
      "train": fdl.Config(
        packed_input.pack_documents,
        source=fdl.Config(python_stdlib.PythonStdlib, split="train"),
        global_batch_size=self.global_batch_size,
        shuffle_seed=self.seed,
        chunk_length=self.length,
        **shared,
      ),
      "validation": fdl.Config(
        packed_input.pack_documents,
        source=fdl.Config(python_stdlib.PythonStdlib, split="validation"),
        global_batch_size=4 * self.global_batch_size,
        shuffle_seed=None,
        num_epochs=1,
        **shared,
      ),
    }

  def baselines(self) -> fdl.Config[text_baselines.TextBaselines] | None:
    """Returns xz and a trigram model on the same bytes."""
    return fdl.Config(
      text_baselines.TextBaselines,
      train=fdl.Config(python_stdlib.PythonStdlib, split="train"),
      held_out=fdl.Config(python_stdlib.PythonStdlib, split="validation"),
    )

  def shrink(self) -> Any:
    """Returns a toy-sized version."""
    return (
      super()
      .shrink()
      .replace(length=32, num_layers=2, embed_dim=16, max_new_tokens=8)
    )
