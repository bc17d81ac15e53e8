"""Decoding methods of Pax: best end, guidance, reranked blocks, cache growth.

A method (`generate.Method`) generates like `generate.generate`, with the same
arguments, in place of it. It changes the steps that it passes on or uses
`generate.Hooks`.

  BestEnd:  samples without end ids, then ends where the whole is most likely
            (`optimize_eos`)
  Guidance: logits = without + scale * (with - without), two prompts a sequence
            (classifier-free guidance; Ho and Salimans 2022,
            https://arxiv.org/abs/2207.12598)
  Rerank:   keeps the best of a few samples after each block of ids (controlled
            decoding; Mudgal et al. 2023, https://arxiv.org/abs/2310.17022)
  Growth:   slots of the cache are added in stages

`score_suffixes` scores given texts after what was generated.

Letters: B batch, P prompt length, R sequences, V vocab, N new ids, E end ids,
U suffixes, W length of a suffix.
"""

from collections.abc import Callable, Collection
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers.decoding import cache_rows, generate, samplers, sampling
from paxon.sharding import checks

Sampler = samplers.Sampler | sampling.BatchSettings
# Maps a generation so far to the value of each sequence, float [R].
Scorer = Callable[[generate.Generation], jax.Array]


@dataclasses.dataclass(frozen=True)
class BestEnd:
  """Ends each sequence where it and an end id are most likely together.

  End ids are never drawn, so all steps are made; log probabilities are those of
  the model.
  """

  def generate(
    self,
    prefill: generate.Prefill,
    decode_step: generate.DecodeStep,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    *,
    sampler: Sampler,
    end_id: int | Collection[int] | None = None,
    **shared: Any,
  ) -> generate.Generation:
    """Returns the sequences, each with an end id.

    Raises:
      ValueError: There is no end id; see also `generate.generate`.
    """
    if end_id is None:
      raise ValueError("BestEnd requires end_id, got None.")
    end_ids = jnp.asarray(generate.to_end_ids(end_id))

    def measure(logits: jax.Array) -> jax.Array:
      log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
      return log_probs[:, end_ids]

    result = generate.generate(
      prefill,
      decode_step,
      prompts,
      prompt_lengths,
      sampler=_exclude(sampler, end_ids),
      end_id=end_id,
      hooks=generate.Hooks(measure=measure),
      **shared,
    )
    least = jnp.int32(0)
    if isinstance(sampler, sampling.BatchSettings):
      least = sampler.min_new_tokens
    return _end_best(result, end_ids, least)


def _exclude(sampler: Sampler, ids: jax.Array) -> Sampler:
  """Returns a sampler that draws none of the end ids."""
  if isinstance(sampler, sampling.BatchSettings):
    most = jnp.full_like(sampler.min_new_tokens, 2**31 - 1)
    return dataclasses.replace(sampler, min_new_tokens=most)
  return lambda logits, key: sampler(logits.at[:, ids].set(-jnp.inf), key)


def _end_best(
  result: generate.Generation, end_ids: jax.Array, least: jax.Array
) -> generate.Generation:
  """Returns each sequence with an end id at the best step from `least` on."""
  assert result.measured is not None
  before = jnp.cumsum(result.log_probs, axis=1) - result.log_probs
  total = before + jnp.max(result.measured, axis=-1)
  steps = jnp.arange(total.shape[1])[None]
  # A limit goes before a minimum.
  first = jnp.minimum(least, result.lengths - 1)[:, None]
  is_possible = (first <= steps) & (steps < result.lengths[:, None])
  total = jnp.where(is_possible, total, -jnp.inf)
  best = jnp.argmax(total, axis=1)
  is_end = steps == best[:, None]
  measured = jnp.take_along_axis(result.measured, best[:, None, None], axis=1)[
    :, 0
  ]
  last = end_ids[jnp.argmax(measured, axis=-1)].astype(jnp.int32)

  def cut(x: jax.Array, end: jax.Array | None = None) -> jax.Array:
    if end is not None:
      x = jnp.where(is_end, end[:, None], x)
    kept = (steps <= best[:, None]).reshape(*x.shape[:2], *(1,) * (x.ndim - 2))
    return jnp.where(kept, x, jnp.zeros((), x.dtype))

  return dataclasses.replace(
    result,
    ids=cut(result.ids, last),
    log_probs=cut(result.log_probs, jnp.max(measured, axis=-1)),
    top_ids=cut(result.top_ids),
    top_log_probs=cut(result.top_log_probs),
    lengths=best.astype(jnp.int32) + 1,
    ended=jnp.ones_like(result.ended),
    measured=None,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guidance:
  """Moves the logits away from those after a negative prompt.

  Both prompts are continued by the same ids. Log probabilities are those of the
  guided logits.

  Attributes:
    scale: Factor of the difference; 1 is the prompt alone, 0 the negative one.
      Several are those of the samples of a prompt.
    negative_ids: Ids of the negative prompt of all prompts, such as only the
      begin id.
  """

  scale: float | tuple[float, ...]
  negative_ids: tuple[int, ...]

  def __post_init__(self) -> None:
    scales = self.scale if isinstance(self.scale, tuple) else (self.scale,)
    if not scales or not all(map(math.isfinite, scales)):
      raise ValueError(
        f"Guidance.scale must be finite, or a tuple of these, got {self.scale}."
      )
    if not self.negative_ids:
      raise ValueError(
        "Guidance.negative_ids must have an id, such as the begin id, got ()."
      )

  def generate(
    self,
    prefill: generate.Prefill,
    decode_step: generate.DecodeStep,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    *,
    num_samples: int = 1,
    **shared: Any,
  ) -> generate.Generation:
    """Returns continuations of both prompts.

    Raises:
      ValueError: There is not one scale for each sample; see also
        `generate.generate`.
    """
    scales = jnp.asarray(self.scale, jnp.float32)
    if scales.ndim and len(scales) != num_samples:
      raise ValueError(
        f"Guidance.scale has {len(scales)} values, and there are {num_samples}"
        " samples; give one for each."
      )
    steps = _GuidedSteps(
      prefill=prefill,
      decode_step=decode_step,
      scales=jnp.broadcast_to(scales, (num_samples,)),
      negative=jnp.asarray(self.negative_ids, jnp.int32),
      lengths=jnp.repeat(prompt_lengths.astype(jnp.int32), num_samples),
    )
    # For `generate` each sample is a prompt, because the logits of samples are
    # mixed by different scales. A prompt is read once nevertheless.
    prompts = jnp.repeat(prompts, num_samples, axis=0)
    return generate.generate(
      steps.read, steps.append, prompts, steps.lengths, **shared
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GuidedSteps:
  """Steps of sequences and of the same ones after a negative prompt.

  Attributes:
    prefill: The model's.
    decode_step: The model's.
    scales: float32 [number of samples].
    negative: Ids of the negative prompt.
    lengths: int32 [R]; number of ids of each prompt.
  """

  prefill: generate.Prefill
  decode_step: generate.DecodeStep
  scales: jax.Array
  negative: jax.Array
  lengths: jax.Array

  def read(
    self,
    ids: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    cache_length: int,
    at: jax.Array,
  ) -> tuple[jax.Array, Any]:
    """Reads both prompts of each sequence, once for its samples."""
    count, size = len(self.scales), len(self.negative)
    more = max(size - ids.shape[1], 0)

    def join(x: jax.Array, other: jax.Array) -> jax.Array:
      x = jnp.pad(x[::count], ((0, 0), (0, more)))
      other = jnp.pad(other, (0, x.shape[1] - size)).astype(x.dtype)
      return jnp.concatenate([x, jnp.broadcast_to(other, x.shape)])

    at = at[::count]
    logits, cache = self.prefill(
      join(ids, self.negative),
      join(positions, jnp.arange(size)),
      join(segment_ids, jnp.ones_like(self.negative)),
      cache_length=cache_length + more,
      at=jnp.concatenate([at, jnp.full_like(at, size - 1)]),
    )
    if count > 1:
      cache = cache_rows.share(cache, count, length=ids.shape[1] + more)
      logits = jnp.repeat(logits, count, axis=0)
    return self._mix(logits), cache

  def append(
    self,
    cache: Any,
    ids: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
  ) -> tuple[jax.Array, Any]:
    """Appends an id to each sequence after both prompts."""
    other = positions + (len(self.negative) - self.lengths)[:, None]
    logits, cache = self.decode_step(
      cache,
      jnp.concatenate([ids, ids]),
      jnp.concatenate([positions, other]),
      jnp.concatenate([segment_ids, segment_ids]),
    )
    return self._mix(logits), cache

  def _mix(self, logits: jax.Array) -> jax.Array:
    given, without = jnp.split(logits.astype(jnp.float32), 2)
    scale = jnp.tile(self.scales, len(given) // len(self.scales))
    return without + scale[:, None, None] * (given - without)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rerank:
  """Keeps the best of each block of samples after some ids.

  Attributes:
    interval: Number of ids between two selections.
    block_num_samples: Number of adjacent samples of which the best one
      continues as all; divides the number of samples of a prompt.
    scorer: Values sequences so far; None is the sum of log probabilities.
  """

  interval: int
  block_num_samples: int
  scorer: Scorer | None = None

  def __post_init__(self) -> None:
    checks.check_size(self, "interval", "block_num_samples")

  def generate(
    self,
    prefill: generate.Prefill,
    decode_step: generate.DecodeStep,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    *,
    num_samples: int = 1,
    **shared: Any,
  ) -> generate.Generation:
    """Returns the samples, those of a block alike but for the last ids.

    Raises:
      ValueError: Samples do not divide into blocks; see `generate.generate`.
    """
    size = self.block_num_samples
    if num_samples % size:
      raise ValueError(
        f"num_samples ({num_samples}) must be a multiple of"
        f" Rerank.block_num_samples ({size})."
      )
    score = self.scorer or (lambda found: jnp.sum(found.log_probs, axis=1))

    def select(found: generate.Generation) -> jax.Array:
      best = jnp.argmax(score(found).reshape(-1, size), axis=1)
      return jnp.repeat(best + size * jnp.arange(len(best)), size)

    return generate.generate(
      prefill,
      decode_step,
      prompts,
      prompt_lengths,
      num_samples=num_samples,
      hooks=generate.Hooks(select=select, interval=self.interval),
      **shared,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
  """Adds slots to the cache in stages; the tokens are the same.

  Steps of a stage read only its slots. Rings and recurrent states do not grow.

  Attributes:
    stages: Increasing numbers of new ids, at least 2; those beyond the maximum
      have no effect.
  """

  stages: tuple[int, ...]

  def __post_init__(self) -> None:
    increasing = all(
      a < b for a, b in zip((1, *self.stages), self.stages, strict=False)
    )
    if not self.stages or not increasing:
      raise ValueError(
        "Growth.stages must be increasing numbers from 2 on, got"
        f" {self.stages}."
      )

  def generate(
    self,
    prefill: generate.Prefill,
    decode_step: generate.DecodeStep,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    **shared: Any,
  ) -> generate.Generation:
    """Returns the tokens of `generate.generate`, generated in stages."""
    return generate.generate(
      prefill,
      decode_step,
      prompts,
      prompt_lengths,
      hooks=generate.Hooks(stages=self.stages),
      **shared,
    )


def score_suffixes(
  prefill: generate.Prefill,
  prompts: Int[Array, "batch prompt_length"],
  prompt_lengths: Int[Array, " batch"],
  result: generate.Generation,
  suffixes: Int[Array, "suffixes suffix_length"],
  suffix_lengths: Int[Array, " suffixes"],
) -> Float[Array, "sequences suffixes"]:
  """Returns the log likelihood of each suffix after each generated sequence.

  A suffix follows the ids without the end id (Pax: a `process_result_fn` with
  `concat_suffix_and_left_align`).

  Args:
    prefill: Reads sequences; without `at` it returns all logits.
    prompts: Ids, padded on the right.
    prompt_lengths: Number of ids of each prompt.
    result: Generated sequences, adjacent those of a prompt.
    suffixes: Ids, padded on the right.
    suffix_lengths: Number of ids of each suffix.
  """
  count = result.ids.shape[0] // prompts.shape[0]
  prompts, begin = (
    jnp.repeat(x, count, axis=0) for x in (prompts, prompt_lengths)
  )
  end = begin + result.lengths - result.ended.astype(jnp.int32)
  sizes = (prompts.shape[1], result.ids.shape[1], suffixes.shape[1])
  at = jnp.arange(sum(sizes))[None]
  shape = (prompts.shape[0], sum(sizes))

  def pick(ids: jax.Array, index: jax.Array) -> jax.Array:
    index = jnp.clip(jnp.broadcast_to(index, shape), 0, ids.shape[1] - 1)
    return jnp.take_along_axis(ids, index, axis=1)

  before = jnp.where(
    at < begin[:, None],
    pick(prompts, at),
    pick(result.ids, at - begin[:, None]),
  )

  def score(given: tuple[jax.Array, jax.Array]) -> jax.Array:
    suffix, length = given
    index = at - end[:, None]
    suffix = jnp.broadcast_to(suffix, (shape[0], suffix.shape[0]))
    ids = jnp.where(index >= 0, pick(suffix, index), before)
    is_token = index < length
    logits, _ = prefill(
      jnp.where(is_token, ids, 0),
      # Padding may be longer than a model's table of positions.
      jnp.where(is_token, at, 0),
      is_token.astype(jnp.int32),
      cache_length=shape[1],
    )
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    each = jnp.take_along_axis(log_probs[:, :-1], ids[:, 1:, None], axis=-1)
    is_scored = (index >= 0) & is_token
    return jnp.sum(jnp.where(is_scored[:, 1:], each[:, :, 0], 0), axis=1)

  # One suffix at a time, because logits of all tokens are large.
  return jax.lax.map(score, (suffixes, suffix_lengths)).T
