"""Whether generation with a quantized cache chooses the same tokens.

Both generate greedily, one with the cache as it is and one with a quantized
one. Up to the first token that differs both have read the same text, so that
token is compared by the margin that the model has there: the difference of its
two best logits. A wide margin that is lost would be a mistake, a narrow one is
what rounding does.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers.decoding import generate, model_steps, samplers
from paxon.layers.decoding import prompts as prompts_lib
from paxon.learners import train_state
from paxon.runner import user_error
from paxon.runner.training import session as session_lib
from paxon.sharding import axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
  """What became of one prompt.

  Attributes:
    prompt: The text.
    tokens: How many were generated.
    equal: How many of them are equal, from the first on.
    margin: The difference of the two best logits where the first token differs;
      `None` if all are equal.
    least: The least such margin of the tokens that are equal; `None` if none
      is.
    chosen: The two tokens that differ, with the plain cache and with the other;
      `None` if all are equal.
  """

  prompt: str
  tokens: int
  equal: int
  margin: float | None
  least: float | None
  chosen: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """What a quantized cache changes.

  Attributes:
    agreements: By prompt.
    plain_bytes: Of the cache as it is, over all devices.
    quantized_bytes: Of the quantized one.
  """

  agreements: tuple[Agreement, ...]
  plain_bytes: int
  quantized_bytes: int


def compare(
  session: session_lib.Session,
  quantized: Any,
  state: train_state.TrainState,
  *,
  prompts: Sequence[str],
  tokens: int,
) -> Comparison:
  """Generates with both caches and compares.

  Args:
    session: The job with its plain cache, on its devices.
    quantized: The same model with another cache.
    state: Placed as the session's shardings say; only what evaluation needs.
    prompts: Texts to continue.
    tokens: How many tokens each; generation does not end before.

  Raises:
    UserError: The job's model does not generate.
  """
  task = session.job.task
  if not task.generates or callable(getattr(task.model, "encode", None)):
    raise user_error.UserError(
      f"{session.job.experiment} has no decoder-only model that generates text."
    )
  tokenizer = task.tokenizer
  assert tokenizer is not None
  texts = [
    [tokenizer.begin_id, *tokenizer.encode(text).tolist()] for text in prompts
  ]
  shards = session.layout.shards(axes.BATCH)
  # Rows beyond the prompts only fill the batch.
  filled = texts + [texts[-1]] * (-len(texts) % shards)
  batch = prompts_lib.right_padded(filled)
  state = session_lib.for_evaluation(state)
  plain, other = (
    _generated(session, model, state, batch, tokens)
    for model in (task.model, quantized)
  )
  margins = _margins(session, state, texts, plain, shards)
  return Comparison(
    agreements=tuple(
      _agreement(prompt, *row)
      for prompt, *row in zip(prompts, plain, other, margins, strict=False)
    ),
    plain_bytes=_cache_bytes(session, task.model, batch, tokens),
    quantized_bytes=_cache_bytes(session, quantized, batch, tokens),
  )


def _agreement(
  prompt: str, plain: np.ndarray, other: np.ndarray, margins: np.ndarray
) -> Agreement:
  """Compares two rows of ids [T], with the margins [T] of the first."""
  different = np.flatnonzero(plain != other)
  equal = int(different[0]) if different.size else len(plain)
  is_equal = equal == len(plain)
  return Agreement(
    prompt=prompt,
    tokens=len(plain),
    equal=equal,
    margin=None if is_equal else float(margins[equal]),
    least=float(margins[:equal].min()) if equal else None,
    chosen=None if is_equal else (int(plain[equal]), int(other[equal])),
  )


def _generated(
  session: session_lib.Session,
  model: Any,
  state: train_state.TrainState,
  batch: prompts_lib.Prompts,
  tokens: int,
) -> np.ndarray:
  """Returns the ids [B,T] that a model generates greedily."""

  def run(
    state: train_state.TrainState, ids: jax.Array, lengths: jax.Array
  ) -> jax.Array:
    variables = session.evaluation_variables(state)
    return generate.generate(
      model_steps.prefill(model, variables),
      model_steps.decode_step(model, variables),
      ids,
      lengths,
      sampler=samplers.Greedy(),
      key=jax.random.key(0),
      max_new_tokens=tokens,
    ).ids

  layout = session.layout
  call = layout.jit(run, out_shardings=layout.replicated)
  return np.asarray(call(state, batch.ids, batch.lengths))


def _margins(
  session: session_lib.Session,
  state: train_state.TrainState,
  texts: Sequence[Sequence[int]],
  generated: np.ndarray,
  shards: int,
) -> np.ndarray:
  """Returns the difference of the two best logits at each generated id [B,T].

  By whole forward passes, one for each prompt.
  """

  def run(
    state: train_state.TrainState, ids: jax.Array, segment_ids: jax.Array
  ) -> jax.Array:
    positions = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    logits: Any = session.job.task.model.apply(
      session.evaluation_variables(state), ids, positions, segment_ids
    )
    best, _ = jax.lax.top_k(logits, 2)
    return best[..., 0] - best[..., 1]

  layout = session.layout
  call = layout.jit(run, out_shardings=layout.replicated)
  tokens = generated.shape[1]
  width = max(map(len, texts)) + tokens
  parts = session.layout.shards(axes.LENGTH)
  width += -width % parts
  rows = np.zeros((len(texts) + -len(texts) % shards, width), np.int32)
  segment_ids = np.zeros_like(rows)
  for i, text in enumerate(texts):
    whole = [*text, *generated[i].tolist()]
    rows[i, : len(whole)] = whole
    segment_ids[i, : len(whole)] = 1
  margins = np.asarray(call(state, rows, segment_ids))
  # What is at a place decides on the id after it.
  return np.stack(
    [
      margins[i, len(text) - 1 : len(text) - 1 + tokens]
      for i, text in enumerate(texts)
    ]
  )


def _cache_bytes(
  session: session_lib.Session,
  model: Any,
  batch: prompts_lib.Prompts,
  tokens: int,
) -> int:
  """Returns the bytes of all arrays of the cache for a batch."""
  slots = batch.ids.shape[1] + tokens - 1

  def prefill(state: train_state.TrainState, ids: jax.Array) -> Any:
    step = model_steps.prefill(model, session.evaluation_variables(state))
    return step(ids, ids, ids, cache_length=slots)[1]

  state = session_lib.for_evaluation(session.abstract_state())
  ids = jax.ShapeDtypeStruct(batch.ids.shape, jnp.int32)
  kept = jax.eval_shape(prefill, state, ids)
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
