"""Sampling settings of each request: arrays of one compiled step.

`Settings` are those of one request, `BatchSettings` those of a batch. A value
changes no shape, so one compiled step serves any mix of requests, and the ids
of a request do not depend on the others. The settings apply in this order:

  penalties:  repetition (prompt and generated ids), frequency and presence
              (generated ids), then the logit bias
  end ids:    -inf before `min_new_tokens`
  truncation: logits / temperature, then top-k, top-p, min-p, typical, epsilon;
              each uses the distribution that the one before has left
  draw:       the key of a request is fold_in(fold_in(key, seed), sample), and
              that of its step i is fold_in(of the request, i)

Of equal logits the smaller id counts as more likely.

Letters: R sequences, V vocab.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key
import numpy as np

from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Settings of one request; the defaults sample from the model.

  Attributes:
    temperature: Divides the logits; 0 selects the most likely id.
    top_k: Keep the `top_k` most likely ids; None keeps all.
    top_p: Keep the fewest most likely ids with at least this probability
      (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751).
    global_normalize: Whether `top_p` counts probabilities of the whole
      vocabulary, not of the ids that `top_k` keeps.
    min_p: Remove ids less likely than this times the most likely one (Nguyen
      et al. 2024, https://arxiv.org/abs/2407.01082).
    typical_p: Keep the fewest ids with at least this probability, those whose
      information is nearest to the entropy first (Meister et al. 2022,
      https://arxiv.org/abs/2202.00666).
    epsilon: Remove ids less likely than this, except the most likely one
      (Hewitt et al. 2022, https://arxiv.org/abs/2210.15191).
    repetition_penalty: Divides positive and multiplies negative logits of ids
      in the prompt or generated (Keskar et al. 2019,
      https://arxiv.org/abs/1909.05858).
    presence_penalty: Subtracted from the logit of each generated id.
    frequency_penalty: Subtracted once for each time that an id was generated.
    logit_bias: Added to the logits of ids; -inf excludes an id.
    min_new_tokens: Number of ids before an end id may follow.
    max_new_tokens: Maximum number of ids; None for that of the batch.
    seed: Requests with the same seed, prompt and settings get the same ids.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float = 1.0
  global_normalize: bool = False
  min_p: float = 0.0
  typical_p: float = 1.0
  epsilon: float = 0.0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  min_new_tokens: int = 0
  max_new_tokens: int | None = None
  seed: int = 0

  def __post_init__(self) -> None:
    checks.check_non_negative(self, "temperature")
    checks.check_positive(self, "repetition_penalty")
    if self.top_k is not None:
      checks.check_size(self, "top_k")
    if self.max_new_tokens is not None:
      checks.check_size(self, "max_new_tokens")
    checks.check_interval(self, "(0, 1]", "top_p", "typical_p")
    checks.check_interval(self, "[0, 1]", "min_p")
    checks.check_interval(self, "[0, 1)", "epsilon")
    checks.check_interval(self, "[0, 2147483648)", "seed", "min_new_tokens")
    for name, penalty in (
      ("presence_penalty", self.presence_penalty),
      ("frequency_penalty", self.frequency_penalty),
    ):
      if not math.isfinite(penalty):
        raise ValueError(f"Settings.{name} must be finite, got {penalty}.")
    for number, bias in self.logit_bias.items():
      if math.isnan(bias) or bias == math.inf:
        raise ValueError(
          f"Settings.logit_bias of id {number} must be finite or -inf, got"
          f" {bias}."
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
  """Ids that a sequence has had, for penalties.

  Attributes:
    in_prompt: Bool [R,V]; whether the prompt has the id.
    counts: int32 [R,V]; how often the id was generated.
  """

  in_prompt: jax.Array
  counts: jax.Array

  def add(
    self, ids: Int[Array, " batch"], keep: Bool[Array, " batch"]
  ) -> "History":
    """Returns the history with one more id of the sequences to `keep`."""
    at = jnp.arange(ids.shape[0])
    counts = self.counts.at[at, ids].add(keep.astype(jnp.int32))
    return dataclasses.replace(self, counts=counts)


def begin(
  prompts: Int[Array, "batch length"],
  lengths: Int[Array, " batch"],
  vocab_size: int,
) -> History:
  """Returns the history of prompts that are padded on the right."""
  shape = (prompts.shape[0], vocab_size)
  inside = jax.lax.broadcasted_iota(jnp.int32, prompts.shape, 1)
  # Indices out of range are dropped.
  ids = jnp.where(inside < lengths[:, None], prompts, vocab_size)
  at = jnp.arange(shape[0])[:, None]
  in_prompt = jnp.zeros(shape, bool).at[at, ids].set(True, mode="drop")
  return History(in_prompt=in_prompt, counts=jnp.zeros(shape, jnp.int32))


_FLOATS = (
  "temperature",
  "top_p",
  "min_p",
  "typical_p",
  "epsilon",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
)
_INTS = (
  "top_k",
  "global_normalize",
  "min_new_tokens",
  "max_new_tokens",
  "seed",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings:
  """Settings of each sequence, arrays [R]; made by `stack`.

  Attributes are those of `Settings`; further ones:

  Attributes:
    top_k: int32 [R]; the largest number where all ids are kept.
    global_normalize: int32 [R]; 0 or 1.
    max_new_tokens: int32 [R]; the largest number without a limit.
    sample: int32 [R]; index of the sample of its prompt.
    logit_bias: float32 [R,V], or None.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  global_normalize: jax.Array
  min_p: jax.Array
  typical_p: jax.Array
  epsilon: jax.Array
  repetition_penalty: jax.Array
  presence_penalty: jax.Array
  frequency_penalty: jax.Array
  min_new_tokens: jax.Array
  max_new_tokens: jax.Array
  seed: jax.Array
  sample: jax.Array
  logit_bias: jax.Array | None = None

  def log_weights(
    self,
    logits: Float[Array, "batch vocab"],
    history: History,
    step: Int[Array, " batch"],
    end_ids: Sequence[int] | Int[Array, "batch ends"] = (),
  ) -> Float[Array, "batch vocab"]:
    """Returns the logits of the distribution that is drawn from, float32.

    At temperature 0 they are those after the penalties.

    Args:
      logits: Logits of the model.
      history: Ids of each sequence.
      step: Number of ids that each sequence has generated.
      end_ids: Ids that end a sequence, or those of each, padded with -1.
    """
    logits = self._penalize(logits.astype(jnp.float32), history)
    if isinstance(end_ids, jax.Array):
      is_early = step < self.min_new_tokens
      exclude = functools.partial(_exclude, ids=end_ids)
      logits = _apply_if(is_early, exclude, logits)
    elif end_ids:
      is_end = np.isin(np.arange(logits.shape[-1]), list(end_ids))
      is_early = (step < self.min_new_tokens)[:, None]
      logits = jnp.where(is_early & is_end[None, :], -jnp.inf, logits)
    divisor = jnp.where(self.temperature > 0, self.temperature, 1)
    logits = logits / divisor[:, None]
    truncates = (self.top_k < logits.shape[-1]) | (self.top_p < 1)
    truncates |= (self.min_p > 0) | (self.typical_p < 1) | (self.epsilon > 0)
    return _apply_if((self.temperature > 0) & truncates, self._truncate, logits)

  def draw(
    self,
    logits: Float[Array, "batch vocab"],
    key: Key[Array, ""],
    history: History,
    step: Int[Array, " batch"],
    end_ids: Sequence[int] | Int[Array, "batch ends"] = (),
  ) -> Int[Array, " batch"]:
    """Returns one id per sequence; the arguments are those of `log_weights`."""
    if self.seed.shape != logits.shape[:1]:
      raise ValueError(
        f"BatchSettings has settings of {self.seed.shape[0]} sequences, and"
        f" there are {logits.shape[0]} (all samples of all prompts)."
      )
    weights = self.log_weights(logits, history, step, end_ids)
    keys = self.keys(key, step)
    drawn = jax.vmap(jax.random.categorical)(keys, weights)
    best = jnp.argmax(weights, axis=-1)
    return jnp.where(self.temperature > 0, drawn, best).astype(jnp.int32)

  def keys(
    self, key: Key[Array, ""], step: Int[Array, " batch"]
  ) -> Key[Array, " batch"]:
    """Returns the key of a step of each sequence."""

    def fold(seed: jax.Array, sample: jax.Array, step: jax.Array) -> jax.Array:
      own = jax.random.fold_in(jax.random.fold_in(key, seed), sample)
      return jax.random.fold_in(own, step)

    return jax.vmap(fold)(self.seed, self.sample, step)

  def _penalize(self, logits: jax.Array, history: History) -> jax.Array:
    def penalize(logits: jax.Array) -> jax.Array:
      counts = history.counts.astype(jnp.float32)
      is_seen = history.in_prompt | (history.counts > 0)
      by = self.repetition_penalty[:, None]
      repeated = jnp.where(logits > 0, logits / by, logits * by)
      logits = jnp.where(is_seen, repeated, logits)
      logits -= self.frequency_penalty[:, None] * counts
      return logits - self.presence_penalty[:, None] * jnp.minimum(counts, 1)

    penalizes = (self.presence_penalty != 0) | (self.frequency_penalty != 0)
    penalizes |= self.repetition_penalty != 1
    logits = _apply_if(penalizes, penalize, logits)
    return logits if self.logit_bias is None else logits + self.logit_bias

  def _truncate(self, logits: jax.Array) -> jax.Array:
    """Returns logits that are -inf for truncated ids."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jax.lax.broadcasted_iota(jnp.int32, ranked.shape, 1)
    keep = rank < self.top_k[:, None]
    counted = keep | (self.global_normalize > 0)[:, None]
    keep &= _covers(_softmax(ranked, counted), self.top_p)
    probs = _softmax(ranked, keep)
    keep &= probs >= self.min_p[:, None] * probs[:, :1]
    keep = jax.lax.cond(
      jnp.any(self.typical_p < 1), self._typical, lambda _, k: k, ranked, keep
    )
    probs = _softmax(ranked, keep)
    most = jnp.max(probs, axis=-1, keepdims=True)
    keep &= (probs >= self.epsilon[:, None]) | (probs == most)
    keep = jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(keep, logits, -jnp.inf)

  def _typical(self, ranked: jax.Array, keep: jax.Array) -> jax.Array:
    probs = _softmax(ranked, keep)
    information = -jnp.log(jnp.where(probs > 0, probs, 1))
    entropy = jnp.sum(probs * information, axis=-1, keepdims=True)
    distance = jnp.where(probs > 0, jnp.abs(information - entropy), jnp.inf)
    order = jnp.argsort(distance, axis=-1, stable=True)
    typical = _covers(jnp.take_along_axis(probs, order, -1), self.typical_p)
    back = jnp.argsort(order, axis=-1)
    return keep & jnp.take_along_axis(typical, back, axis=-1)


def stack(
  settings: Sequence[Settings],
  *,
  num_samples: int = 1,
  vocab_size: int | None = None,
) -> BatchSettings:
  """Returns the settings of requests as arrays.

  Args:
    settings: Settings of each request.
    num_samples: Number of adjacent sequences of each request.
    vocab_size: Size of the logits; required for `logit_bias`. Batches with it
      and without it compile separately.

  Raises:
    ValueError: There is no request, or an id of a bias is not in the
      vocabulary.
  """
  if not settings:
    raise ValueError("settings must not be empty.")
  unlimited = np.iinfo(np.int32).max

  def gather(name: str, dtype: type) -> jax.Array:
    values = [getattr(each, name) for each in settings]
    values = [unlimited if value is None else value for value in values]
    return jnp.asarray(np.repeat(np.asarray(values, dtype), num_samples))

  bias = None
  if vocab_size is not None:
    bias = np.zeros((len(settings), vocab_size), np.float32)
    for biases, each in zip(bias, settings, strict=True):
      for number, value in each.logit_bias.items():
        if not 0 <= number < vocab_size:
          raise ValueError(
            f"logit_bias has the id {number}, which is not in the vocabulary of"
            f" {vocab_size} ids."
          )
        biases[number] = value
    bias = jnp.asarray(np.repeat(bias, num_samples, axis=0))
  elif any(each.logit_bias for each in settings):
    raise ValueError(
      "stack needs vocab_size, because a request has logit_bias."
    )
  floats = {name: gather(name, np.float32) for name in _FLOATS}
  ints = {name: gather(name, np.int32) for name in _INTS}
  sample = np.tile(np.arange(num_samples, dtype=np.int32), len(settings))
  return BatchSettings(
    **floats, **ints, sample=jnp.asarray(sample), logit_bias=bias
  )


def _apply_if(
  selected: jax.Array, fn: Callable[[jax.Array], jax.Array], logits: jax.Array
) -> jax.Array:
  """Applies `fn` to the `selected` sequences; to none if there are none."""
  return jax.lax.cond(
    jnp.any(selected),
    lambda x: jnp.where(selected[:, None], fn(x), x),
    lambda x: x,
    logits,
  )


def _exclude(logits: jax.Array, *, ids: jax.Array) -> jax.Array:
  """Returns logits that are -inf for ids [R,E] of each sequence."""
  at = jnp.arange(ids.shape[0])[:, None]
  # Indices out of range are dropped; negative ones would count from the end.
  ids = jnp.where(ids < 0, logits.shape[-1], ids)
  return logits.at[at, ids].set(-jnp.inf, mode="drop")


def _softmax(logits: jax.Array, keep: jax.Array) -> jax.Array:
  return jax.nn.softmax(jnp.where(keep, logits, -jnp.inf), axis=-1)


def _covers(probs: jax.Array, mass: jax.Array) -> jax.Array:
  """Returns whether each is among the first with that probability mass."""
  before = jnp.cumsum(probs, axis=-1) - probs
  # Rounded sums can reach 1 before the last id, so 1 must not be compared.
  return (before < mass[:, None]) | (mass >= 1)[:, None]
