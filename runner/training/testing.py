"""A tiny language model on made-up text, for tests of programs.

As a program it trains in a folder: `python -m paxon.runner.training.testing
FOLDER knob=value ...`, for tests that kill it.
"""

import ast
import dataclasses
import functools
import hashlib
import sys
import time
from typing import Any

from etils import epath
import fiddle as fdl
import jax
import numpy as np

from paxon.inputs import base_input, byte_tokenizer, packed_input
from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream
from paxon.layers import embedding, feed_forward
from paxon.layers.attention import grouped_query
from paxon.layers.models import pre_norm_decoder
from paxon.layers.norms import rms_norm
from paxon.layers.positions import rotary_embedding
from paxon.learners import learner as learner_lib
from paxon.learners import metrics, parameter_average, schedules
from paxon.learners.optimizers import adamw
from paxon.runner import experiment
from paxon.runner import job as job_lib
from paxon.runner import task as task_lib
from paxon.runner.session import session as session_lib
from paxon.runner.session import stop_signals
from paxon.runner.settings import generation as generation_lib
from paxon.runner.settings import training
from paxon.runner.training import train

_MAX_DOCUMENTS = 10_000
_WORDS = ("def ", "return ", "x", "y", " = ", "1", " + ", "\n", "  ", "(", ")")


def documents(num_documents: int, *, seed: int) -> list[str]:
  """Returns made-up source text of 20 to 60 words a document."""
  random = np.random.default_rng(seed)
  return [
    "".join(random.choice(_WORDS, size=random.integers(20, 60)))
    for _ in range(num_documents)
  ]


@dataclasses.dataclass(kw_only=True, eq=False)
class SlowInput(packed_input.PackedInput):
  """Waits before each batch, so that a test can kill a run in the middle."""

  delay: float = 0.0

  def get_next(self) -> base_input.Batch:
    """Returns the next batch, later."""
    time.sleep(self.delay)
    return super().get_next()


def source(num_documents: int, seed: int) -> example_source.InMemoryDocuments:
  """Returns the documents, in a configuration that stays short.

  Raises:
    ValueError: There would be so many that making them takes seconds.
  """
  if not 0 <= num_documents <= _MAX_DOCUMENTS:
    raise ValueError(
      f"num_documents must be from 0 to {_MAX_DOCUMENTS}, got {num_documents}."
    )
  return example_source.InMemoryDocuments(
    tuple(documents(num_documents, seed=seed))
  )


class TinyLm(experiment.Experiment):
  """Two layers, two query heads, one key/value head."""

  num_train_steps = 12
  global_batch_size = 8
  checkpoint_every_steps = 4
  eval_every_steps = 6
  summary_every_steps = 1

  num_layers: int = 2
  embed_dim: int = 16
  scan: bool = True
  learning_rate: float = 3e-3
  delay: float = 0.0
  max_new_tokens = 12
  prompts = ("def ", "x")
  num_microbatches: int = 1
  average_decay: float | None = None
  patience: int | None = None
  # Per evaluation of a rolling split; None for no such split.
  rolling_batches: int | None = None

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns a byte-level decoder."""
    attention = fdl.Config(
      grouped_query.GroupedQueryAttention,
      num_heads=2,
      num_kv_heads=2,
      head_dim=8,
      rotary=fdl.Config(rotary_embedding.Rotary),
    )
    average = None
    if self.average_decay is not None:
      average = fdl.Config(
        parameter_average.ParameterAverage, decay=self.average_decay
      )
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=pre_norm_decoder.compose(
        fdl.Config,
        embedding=fdl.Config(
          embedding.Embedding,
          vocab_size=byte_tokenizer.ByteTokenizer().padded_vocab_size,
          embed_dim=self.embed_dim,
        ),
        norm=functools.partial(fdl.Config, rms_norm.RmsNorm),
        attention=attention,
        feed_forward=fdl.Config(
          feed_forward.GatedFeedForward, mlp_dim=2 * self.embed_dim
        ),
        num_layers=self.num_layers,
        scan=self.scan,
      ),
      learner=fdl.Config(
        learner_lib.Learner,
        optimizer=fdl.Config(
          adamw.AdamW,
          schedule=fdl.Config(
            schedules.WarmupCosine,
            peak=self.learning_rate,
            warmup_steps=2,
            total_steps=self.num_train_steps,
          ),
          weight_decay=0.1,
        ),
        max_grad_norm=1.0,
        num_microbatches=self.num_microbatches,
        average=average,
      ),
      metrics=(metrics.bits_per_byte,),
      tokenizer=fdl.Config(byte_tokenizer.ByteTokenizer),
    )

  def datasets(self) -> dict[str, fdl.Config[base_input.BaseInput]]:
    """Returns an endless training split and a finite one."""
    shared: dict[str, Any] = {
      "tokenizer": fdl.Config(byte_tokenizer.ByteTokenizer),
      "global_batch_size": self.global_batch_size,
      "length": 16,
    }
    rolling: dict[str, fdl.Config[base_input.BaseInput]] = {}
    if self.rolling_batches is not None:
      rolling["rolling"] = fdl.Config(
        packed_input.pack_documents,
        source=fdl.Config(source, num_documents=5, seed=2),
        shuffle_seed=None,
        num_epochs=1,
        eval_loop_num_batches=self.rolling_batches,
        reset_for_eval=False,
        **shared,
      )
    return {
      "train": fdl.Config(
        SlowInput,
        examples=fdl.Config(
          example_stream.Examples,
          source=fdl.Config(
            example_source.TokenizedDocuments,
            source=fdl.Config(source, num_documents=20, seed=0),
            tokenizer=shared["tokenizer"],
          ),
          shuffle_seed=self.seed,
        ),
        delay=self.delay,
        **shared,
      ),
      "validation": fdl.Config(
        packed_input.pack_documents,
        source=fdl.Config(source, num_documents=5, seed=1),
        shuffle_seed=None,
        num_epochs=1,
        **shared,
      ),
      **rolling,
    }

  def early_stopping(
    self,
  ) -> fdl.Config[training.EarlyStopping] | None:
    """Returns a rule that no run of this size satisfies, if there is one."""
    if self.patience is None:
      return None
    return fdl.Config(
      training.EarlyStopping, patience=self.patience, min_delta=100.0
    )

  def generation(
    self,
  ) -> fdl.Config[generation_lib.GenerationSettings] | None:
    """Returns two greedy samples, or none without a token to add."""
    settings = super().generation()
    return settings if self.max_new_tokens else None


def make(**knobs: Any) -> tuple[job_lib.Job, fdl.Config[job_lib.Job]]:
  """Returns the job of `TinyLm` with other knobs, and its configuration."""
  config = TinyLm(**knobs).job()
  return fdl.build(config), config


def greedy_continuation(
  session: session_lib.Session, variables: Any, prompt: str
) -> tuple[str, list[int]]:
  """Continues a prompt by whole forward passes, without a cache.

  Returns:
    The text and the ids added.
  """
  tokenizer = session.job.task.tokenizer
  settings = session.job.generation
  assert tokenizer is not None
  assert settings is not None
  ids = [tokenizer.begin_id, *tokenizer.encode(prompt).tolist()]
  start, length = len(ids), len(ids) + settings.max_new_tokens
  apply = jax.jit(session.job.task.model.apply)
  while len(ids) < length and ids[-1] != tokenizer.end_id:
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(ids)] = ids
    positions = np.arange(length, dtype=np.int32)[None]
    segment_ids = (positions < len(ids)).astype(np.int32)
    logits = apply(variables, tokens, positions, segment_ids)
    ids.append(int(np.argmax(logits[0, len(ids) - 1])))
  return tokenizer.decode(ids[start:]), ids[start:]


def digest(tree: Any) -> str:
  """Returns the sha256 of all leaves with their paths, shapes and dtypes."""
  result = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    array = np.asarray(leaf)
    result.update(jax.tree_util.keystr(path).encode())
    result.update(f"{array.shape}{array.dtype.name}".encode())
    result.update(array.tobytes())
  return result.hexdigest()


def main(arguments: list[str]) -> int:
  """Trains in a folder as `runner.main` does; knobs are `name=value`."""
  folder, *assignments = arguments
  pairs = (text.split("=", 1) for text in assignments)
  job, config = make(**{name: ast.literal_eval(text) for name, text in pairs})
  epath.Path(folder).mkdir(parents=True, exist_ok=True)
  result = train.run(job, config, epath.Path(folder))
  return stop_signals.find_exit_status(result.stopped_by)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
