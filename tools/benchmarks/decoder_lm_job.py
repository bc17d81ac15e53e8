"""The model of `pure_jax_decoder_lm`, made of our own parts, as a job.

Parts are put together without Fiddle and without an experiment: the bench
changes sizes only.
"""

from collections.abc import Mapping
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from paxon.layers import (
  embedding,
  feed_forward,
  rms_norm,
  rotary_embedding,
)
from paxon.layers.attention import grouped_query
from paxon.layers.models import decoder_lm, pre_norm_decoder
from paxon.learners import adamw, learner, train_state, warmup_cosine
from paxon.runner import job as job_lib
from paxon.runner import task
from paxon.tools.benchmarks import pure_jax_decoder_lm, random_tokens

# Where our variables, below `params`, stand in the other model.
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
    c: Sizes of the model, and how it learns.
    global_batch_size: Rows of a batch.
    length: Tokens of a row.
    **fields: Others of the job, such as its intervals and mesh.
  """
  schedule = warmup_cosine.WarmupCosine(
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
    train_input=random_tokens.RandomTokens(
      global_batch_size=global_batch_size,
      length=length,
      vocab_size=c.vocab_size,
    ),
    **given,
  )


def to_pure_jax(state: train_state.TrainState) -> dict[str, Any]:
  """Returns a copy of our state in the form of the other model's."""
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
  # Copied, because both steps take the memory of their state over.
  return jax.tree.map(jnp.copy, result | {"step": state.step})


def from_pure_jax(params: Mapping[str, jax.Array]) -> dict[str, Any]:
  """Returns the parameters of the other model in the form of ours.

  Args:
    params: By their names there.
  """
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
