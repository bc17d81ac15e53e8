"""The quickstart: a byte-level language model of Python's standard library.

It needs no download: it reads the source code of the interpreter's standard
library.
"""

import abc
import functools
import math
from typing import Any

import fiddle as fdl

from paxon.inputs import (
  packed_input,
  python_stdlib,
  text_baselines,
)
from paxon.layers import (
  embedding,
  feed_forward,
  rms_norm,
  rotary_embedding,
  softmax_loss,
)
from paxon.layers.attention import grouped_query
from paxon.layers.models import pre_norm_decoder
from paxon.learners import adamw, learner, metrics, schedules
from paxon.runner import experiment
from paxon.runner import task as task_lib
from paxon.tasks.lm import tokenized


class PythonStdlib(tokenized.Tokenized, experiment.Experiment):
  """Base of experiments on 11 MB of Python source code; models differ."""

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

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model and its learner."""
    optimizer = fdl.Config(
      adamw.AdamW,
      schedule=fdl.Config(
        schedules.WarmupCosine,
        peak=self.peak_learning_rate,
        warmup_steps=min(self.warmup_steps, self.num_train_steps),
        total_steps=self.num_train_steps,
        end=0.05 * self.peak_learning_rate,
      ),
      b2=0.99,
      weight_decay=self.weight_decay,
    )
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=self.model(),
      learner=fdl.Config(
        learner.Learner, optimizer=optimizer, max_grad_norm=1.0
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


class PythonStdlibLm(PythonStdlib):
  """0.8 M parameters on 11 MB of Python source code, for any machine.

  bazel run //runner:main -- --exp=tasks.lm.params.quickstart.PythonStdlibLm

  Measured 2026-11-21 on two CPU cores with Python 3.11.2: under six minutes,
  including installation; 1.60 bits per byte on held-out files, where `xz -9e`
  reaches 1.56 and a byte trigram model 2.44.
  """

  num_layers = 4

  mlp_dim: int = 384
  num_heads: int = 4
  num_kv_heads: int = 1
  head_dim: int = 32

  def feed_forward(self) -> fdl.Config[Any]:
    """Returns the feed-forward submodule of a layer."""
    return fdl.Config(feed_forward.GatedFeedForward, mlp_dim=self.mlp_dim)

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    attention = fdl.Config(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      rotary=fdl.Config(rotary_embedding.Rotary),
    )
    return pre_norm_decoder.compose(
      fdl.Config,
      embedding=self.embedding(),
      norm=functools.partial(fdl.Config, rms_norm.RmsNorm),
      attention=attention,
      feed_forward=self.feed_forward(),
      num_layers=self.num_layers,
      scan=self.scan_layers,
      token_loss=fdl.Config(softmax_loss.SoftmaxLoss),
    )

  def shrink(self) -> "PythonStdlibLm":
    """Returns a toy-sized version."""
    return super().shrink().replace(mlp_dim=32, num_heads=2, head_dim=8)
