"""A training job for the model of `pure_jax_decoder_lm`, on random tokens.

The model is composed of Paxon's layers without Fiddle and without an
experiment, as only its sizes change.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs import base_input
from paxon.layers import (
  embedding,
  feed_forward,
  rms_norm,
  rotary_embedding,
)
from paxon.layers.attention import grouped_query
from paxon.layers.models import decoder_lm, pre_norm_decoder
from paxon.learners import adamw, learner, schedules, train_state
from paxon.runner import job as job_lib
from paxon.runner import task
from paxon.tools.benchmarks import pure_jax_decoder_lm


@dataclasses.dataclass(kw_only=True, eq=False)
class RandomTokens(base_input.BaseInput):
  """An endless input; batch `n` is a function of the seed and `n`.

  Attributes:
    vocab_size: Upper bound of the ids.
    seed: Seed of the random numbers.
  """

  vocab_size: int
  seed: int = 0
  _next: int = dataclasses.field(default=0, init=False, repr=False)

  def get_next(self) -> base_input.Batch:
    """Returns this host's sequences: packed documents and some padding."""
    random = np.random.default_rng((self.seed, self._next))
    self._next += 1
    shape = self.global_batch_size, self.length
    tokens = random.integers(0, self.vocab_size, (shape[0], shape[1] + 1))
    # The probability that a document ends at a position: about four a sequence.
    ends = random.random(shape) < min(0.5, 4 / self.length)
    segment_ids = 1 + np.cumsum(ends, axis=1) - ends
    indices = np.broadcast_to(np.arange(self.length), shape)
    begins = np.pad(ends[:, :-1], ((0, 0), (1, 0)))
    positions = indices - np.maximum.accumulate(indices * begins, axis=1)
    padding = indices >= self.length - random.integers(
      0, max(1, self.length // 32), (shape[0], 1)
    )
    arrays = {
      "inputs": tokens[:, :-1],
      "targets": tokens[:, 1:],
      "positions": positions,
      "segment_ids": segment_ids,
      "target_bytes": np.ones(shape),
    }
    batch: base_input.Batch = {
      name: np.where(padding, 0, value).astype(np.int32)
      for name, value in arrays.items()
    }
    batch["weights"] = np.where(padding, 0, 1).astype(np.float32)
    begin = self.infeed_host_index * self.per_host_batch_size
    end = begin + self.per_host_batch_size
    return {name: value[begin:end] for name, value in batch.items()}

  def reset(self) -> None:
    """Returns to the first batch."""
    self._next = 0

  def get_state(self) -> base_input.State:
    """Returns the number of batches read."""
    return {"next": self._next}

  def set_state(self, state: base_input.State) -> None:
    """Restores a state that `get_state` returned."""
    if set(state) != {"next"}:
      raise ValueError(
        f"RandomTokens cannot restore {state}; it needs the key `next` only."
      )
    self._next = state["next"]


# For each parameter of the plain JAX model, its path in ours.
NAMES: Mapping[str, tuple[str, ...]] = {
  "table": ("embedding", "table"),
  "q": ("stack", "layers", "blocks_0", "attention", "query"),
  "k": ("stack", "layers", "blocks_0", "attention", "key"),
  "v": ("stack", "layers", "blocks_0", "attention", "value"),
  "out": ("stack", "layers", "blocks_0", "attention", "out"),
  "gate": ("stack", "layers", "blocks_0", "feed_forward", "gate"),
  "up": ("stack", "layers", "blocks_0", "feed_forward", "up"),
  "down": ("stack", "layers", "blocks_0", "feed_forward", "down"),
  "attention_norm": ("stack", "layers", "blocks_0", "attention_norm", "scale"),
  "mlp_norm": ("stack", "layers", "blocks_0", "feed_forward_norm", "scale"),
  "final_norm": ("final_norm", "scale"),
}


def make_model(c: pure_jax_decoder_lm.Config) -> decoder_lm.DecoderLm:
  """Returns the model with the sizes of `c`."""
  dtype = jnp.dtype(c.dtype)
  return pre_norm_decoder.compose(
    pre_norm_decoder.build,
    embedding=embedding.Embedding(
      vocab_size=c.vocab_size,
      embed_dim=c.embed_dim,
      input_scale=math.sqrt(c.embed_dim),
      dtype=dtype,
    ),
    norm=functools.partial(rms_norm.RmsNorm, dtype=dtype),
    attention=grouped_query.GroupedQueryAttention(
      num_heads=c.num_heads,
      num_kv_heads=c.num_kv_heads,
      head_dim=c.head_dim,
      rotary=rotary_embedding.Rotary(),
      dtype=dtype,
    ),
    feed_forward=feed_forward.GatedFeedForward(mlp_dim=c.mlp_dim, dtype=dtype),
    num_layers=c.num_layers,
  )


def make_job(
  c: pure_jax_decoder_lm.Config,
  *,
  global_batch_size: int,
  length: int,
  **fields: Any,
) -> job_lib.Job:
  """Returns a job that trains the model on random tokens.

  Args:
    c: Sizes of the model and hyperparameters.
    global_batch_size: Sequences per batch.
    length: Tokens per sequence.
    **fields: Other fields of the job, such as intervals and mesh.
  """
  schedule = schedules.WarmupCosine(
    peak=c.peak,
    warmup_steps=c.warmup_steps,
    total_steps=c.total_steps,
    end=0.05 * c.peak,
  )
  optimizer = adamw.AdamW(
    schedule=schedule, b2=c.b2, weight_decay=c.weight_decay
  )
  given: dict[str, Any] = {
    "eval_inputs": {},
    "num_train_steps": c.total_steps,
    **fields,
  }
  return job_lib.Job(
    experiment="paxon.tools.benchmarks.decoder_lm_job",
    task=task.Task(
      name="decoder_lm",
      model=make_model(c),
      learner=learner.Learner(optimizer=optimizer, max_grad_norm=1.0),
    ),
    train_input=RandomTokens(
      global_batch_size=global_batch_size,
      length=length,
      vocab_size=c.vocab_size,
    ),
    **given,
  )


def to_pure_jax(state: train_state.TrainState) -> dict[str, Any]:
  """Returns a copy of our train state in the layout of the plain JAX one."""
  # The chain of optax holds Adam's state first.
  adam: Any = state.opt_state[0]  # pyrefly: ignore
  trees = {
    "params": state.variables["params"],
    "mu": adam.mu["params"],
    "nu": adam.nu["params"],
  }
  result: dict[str, Any] = {
    group: {name: _at(tree, path) for name, path in NAMES.items()}
    for group, tree in trees.items()
  }
  # Copied, because both steps donate their state.
  return jax.tree.map(jnp.copy, result | {"step": state.step})


def from_pure_jax(params: Mapping[str, jax.Array]) -> dict[str, Any]:
  """Returns plain JAX parameters in the layout of our variables."""
  tree: dict[str, Any] = {}
  for name, (*outer, last) in NAMES.items():
    inner = tree
    for part in outer:
      inner = inner.setdefault(part, {})
    inner[last] = params[name]
  return tree


def _at(tree: Any, path: tuple[str, ...]) -> jax.Array:
  for name in path:
    tree = tree[name]
  return tree
