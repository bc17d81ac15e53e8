"""Connectionist temporal classification: loss, alignment and decoding.

Graves et al. 2006, https://dl.acm.org/doi/10.1145/1143844.1143891. An alignment
has a label or the blank in each frame; merging equal neighbors and then leaving
out the blanks gives its text. The loss is minus the log probability that an
alignment has the given labels, where the frames are independent:

  loss = -log(sum over alignments of prod_t softmax(logits)[t, alignment[t]])

The sum is computed over the states `blank, y1, blank, y2, ..., blank`: a frame
keeps the state, or goes to the next one, or skips a blank between different
labels.

Letters: B batch, T frames, L labels, V vocabulary with the blank.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from paxon.layers import precision

# Of impossible states. Finite, because the gradient of log(0 + 0) is NaN.
_NEVER = -1e30


def loss(
  logits: Float[Array, "batch frames vocab"],
  frame_mask: Bool[Array, "batch frames"],
  labels: Int[Array, "batch labels"],
  label_mask: Bool[Array, "batch labels"],
  *,
  blank_id: int = 0,
) -> Float[Array, "batch"]:
  """Returns minus the log probability of the labels, in nats.

  As `torch.nn.CTCLoss`, inf where no alignment is possible: there are fewer
  frames than labels and pairs of equal neighbors. The gradient is then zero.

  Args:
    logits: Normalized here; may be NaN where they are masked.
    frame_mask: True for real frames, anywhere.
    labels: Ids without the blank.
    label_mask: True for real labels, which come first.
    blank_id: Id of the blank.
  """
  states = _make_states(logits, frame_mask, labels, label_mask, blank_id)
  total = _log_likelihood(
    states.emitted, states.can_skip, states.count, frame_mask
  )
  return jnp.where(total > _NEVER / 2, -total, jnp.inf)


@jax.custom_vjp
def _log_likelihood(
  emitted: jax.Array,
  can_skip: jax.Array,
  count: jax.Array,
  frame_mask: jax.Array,
) -> jax.Array:
  """Returns the log probability [B] of all alignments; see `_States`.

  The gradient is the probability of each state in each frame, by the forward
  and backward scores of the paper. Differentiating the loop over the frames
  takes three times as long, and saves what each iteration computes.
  """
  before = _at(jnp.zeros_like(count), can_skip)
  score, _ = _add_up(emitted, can_skip, before, frame_mask)
  return _total(score, count)


def _add_up(
  emitted: jax.Array,
  can_skip: jax.Array,
  before: jax.Array,
  frame_mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the scores of all states at the end, and by frame [T,...,S].

  Args:
    emitted: Log probabilities [...,T,S].
    can_skip: Whether the state before may be left out, [...,S].
    before: Scores before the first frame, [...,S].
    frame_mask: True for real frames, [...,T]; others change no score.
  """

  def advance(
    score: jax.Array, frame: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    emitted, is_real = frame
    one, two = _shift(score, 1), _shift(score, 2)
    two = jnp.where(can_skip, two, _NEVER)
    largest = jnp.maximum(jnp.maximum(score, one), two)
    shares = (jnp.exp(each - largest) for each in (score, one, two))
    moved = largest + jnp.log(sum(shares)) + emitted
    moved = jnp.maximum(moved, _NEVER)
    score = jnp.where(is_real[..., None], moved, score)
    return score, score

  frames = jnp.moveaxis(emitted, -2, 0), jnp.moveaxis(frame_mask, -1, 0)
  return jax.lax.scan(advance, before.astype(emitted.dtype), frames)


def _at(state: jax.Array, like: jax.Array) -> jax.Array:
  """Returns scores [B,S] where only one state [B] is possible.

  State 0 before the first frame: that is a blank, or the first label.
  """
  indices = jnp.arange(like.shape[-1], dtype=jnp.int32)[None]
  return jnp.where(indices == state[:, None], 0.0, _NEVER)


def _total(score: jax.Array, count: jax.Array) -> jax.Array:
  """Returns the score of the last blank and the last label, [B]."""
  last = 2 * count[:, None]
  at_blank = jnp.take_along_axis(score, last, axis=1)[:, 0]
  at_label = jnp.take_along_axis(score, jnp.maximum(last - 1, 0), axis=1)[:, 0]
  return jnp.logaddexp(at_blank, jnp.where(count > 0, at_label, _NEVER))


def _forward(
  emitted: jax.Array,
  can_skip: jax.Array,
  count: jax.Array,
  frame_mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the log probabilities of the labels and of each state, [B,T,S]."""
  # From the end, with states and frames in the opposite order, the same loop
  # gives the scores of what follows; both directions are one loop.
  size = can_skip.shape[1]
  ends = _at(size - 1 - 2 * count, can_skip)
  skips = jnp.pad(jnp.flip(can_skip, 1), ((0, 0), (2, 0)))[:, :size]
  last, scores = _add_up(
    jnp.stack([emitted, jnp.flip(emitted, (1, 2))]),
    jnp.stack([can_skip, skips]),
    jnp.stack([_at(jnp.zeros_like(count), can_skip), ends]),
    jnp.stack([frame_mask, jnp.flip(frame_mask, 1)]),
  )
  total = _total(last[0], count)
  until = jnp.moveaxis(scores[:, 0], 0, 1)
  after = jnp.flip(jnp.moveaxis(scores[:, 1], 0, 1), (1, 2))
  # Both contain the frame's own probability.
  found = until + after - emitted - total[:, None, None]
  is_possible = jnp.minimum(until, after) > _NEVER / 2
  is_possible &= (total > _NEVER / 2)[:, None, None] & frame_mask[..., None]
  return total, jnp.exp(jnp.where(is_possible, found, -jnp.inf))


def _backward(
  of_states: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None, None, None]:
  return gradient[:, None, None] * of_states, None, None, None


_log_likelihood.defvjp(_forward, _backward)


class _States(NamedTuple):
  """The states `blank, y1, blank, ..., blank` of texts, S = 2 L + 1.

  Attributes:
    ids: Ids that they emit, [B,S].
    emitted: Log probabilities of these, [B,T,S].
    can_skip: Whether the blank before a state may be left out, [B,S].
    count: Number of labels, int32 [B].
  """

  ids: jax.Array
  emitted: jax.Array
  can_skip: jax.Array
  count: jax.Array


def _make_states(
  logits: jax.Array,
  frame_mask: jax.Array,
  labels: jax.Array,
  label_mask: jax.Array,
  blank_id: int,
) -> _States:
  batch, frames, _ = logits.shape
  size = 2 * labels.shape[1] + 1
  logits = jnp.where(frame_mask[:, :, None], logits, 0)
  log_probs = jax.nn.log_softmax(precision.widen(logits), axis=-1)
  blanks = jnp.full((batch, labels.shape[1] + 1), blank_id, labels.dtype)
  ids = jnp.zeros((batch, size), labels.dtype)
  ids = ids.at[:, ::2].set(blanks).at[:, 1::2].set(labels)
  # Ids of masked labels may be out of range.
  count = jnp.sum(label_mask, axis=1, dtype=jnp.int32)
  is_state = jnp.arange(size, dtype=jnp.int32)[None] <= 2 * count[:, None]
  ids = jnp.where(is_state, ids, blank_id)
  emitted = jnp.take_along_axis(
    log_probs, jnp.broadcast_to(ids[:, None], (batch, frames, size)), axis=2
  )
  can_skip = jnp.pad(ids[:, 2:] != ids[:, :-2], ((0, 0), (2, 0)))
  return _States(ids, emitted, can_skip, count)


class Alignment(NamedTuple):
  """The most likely alignments of texts.

  Attributes:
    ids: Label or blank of each frame, [B,T]; the blank where it is masked.
    indices: Index of that label in the text, int32 [B,T]; -1 for blanks.
    log_probs: Log probabilities of the alignments, in at least float32 [B];
      -inf where no alignment is possible, and the others mean nothing.
  """

  ids: jax.Array
  indices: jax.Array
  log_probs: jax.Array


def align(
  logits: Float[Array, "batch frames vocab"],
  frame_mask: Bool[Array, "batch frames"],
  labels: Int[Array, "batch labels"],
  label_mask: Bool[Array, "batch labels"],
  *,
  blank_id: int = 0,
) -> Alignment:
  """Returns the most likely alignment of each text (forced alignment).

  Arguments are those of `loss`. The first and last frame of a label are the
  time of a character.
  """
  states = _make_states(logits, frame_mask, labels, label_mask, blank_id)

  def advance(
    score: jax.Array, frame: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    emitted, is_real = frame
    sources = [score, _shift(score, 1)]
    sources.append(jnp.where(states.can_skip, _shift(score, 2), _NEVER))
    stacked = jnp.stack(sources)
    step = jnp.argmax(stacked, axis=0).astype(jnp.int32)
    moved = jnp.maximum(jnp.max(stacked, axis=0) + emitted, _NEVER)
    real = is_real[:, None]
    return jnp.where(real, moved, score), jnp.where(real, step, 0)

  by_frame = jnp.moveaxis(states.emitted, 1, 0), frame_mask.T
  before = _at(jnp.zeros_like(states.count), states.ids)
  score, steps = jax.lax.scan(
    advance, before.astype(states.emitted.dtype), by_frame
  )
  last = 2 * states.count
  at = jnp.stack([last, jnp.maximum(last - 1, 0)], axis=1)
  ends = jnp.take_along_axis(score, at, axis=1)
  best = jnp.argmax(ends, axis=1).astype(jnp.int32)[:, None]
  end = jnp.take_along_axis(at, best, axis=1)
  total = jnp.max(ends, axis=1)

  def go_back(state: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    return state - jnp.take_along_axis(step, state, axis=1), state[:, 0]

  _, path = jax.lax.scan(go_back, end, steps, reverse=True)
  path = jnp.where(frame_mask, path.T, 0)
  return Alignment(
    jnp.take_along_axis(states.ids, path, axis=1),
    jnp.where(path % 2 == 1, path // 2, -1),
    jnp.where(total > _NEVER / 2, total, -jnp.inf),
  )


def _shift(score: jax.Array, by: int) -> jax.Array:
  """Returns the scores [...,S] of the states that are `by` before."""
  count = score.shape[-1]
  widths = [(0, 0)] * (score.ndim - 1) + [(by, 0)]
  return jnp.pad(score, widths, constant_values=_NEVER)[..., :count]


class Decoded(NamedTuple):
  """Ids of texts.

  Attributes:
    ids: int32 [B,T], without blanks; zeros after the end.
    lengths: int32 [B].
  """

  ids: jax.Array
  lengths: jax.Array


def greedy(
  logits: Float[Array, "batch frames vocab"],
  frame_mask: Bool[Array, "batch frames"],
  *,
  blank_id: int = 0,
) -> Decoded:
  """Returns the texts of the most likely alignments.

  Padding frames are left out, wherever they are.
  """
  batch, frames, _ = logits.shape
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  # Real frames first, in order.
  order = jnp.argsort(~frame_mask, axis=1, stable=True)
  best = jnp.take_along_axis(best, order, axis=1)
  is_real = jnp.take_along_axis(frame_mask, order, axis=1)
  before = jnp.pad(best[:, :-1], ((0, 0), (1, 0)), constant_values=blank_id)
  keep = is_real & (best != blank_id) & (best != before)
  lengths = jnp.sum(keep, axis=1, dtype=jnp.int32)
  place = jnp.where(keep, jnp.cumsum(keep, axis=1, dtype=jnp.int32) - 1, frames)
  rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
  ids = jnp.zeros((batch, frames), jnp.int32)
  return Decoded(ids.at[rows, place].set(best, mode="drop"), lengths)


class Scored(NamedTuple):
  """A beginning of a text.

  Attributes:
    score: Added to its log probability when texts are compared.
    state: Of the scorer.
  """

  score: float
  state: Any


class TextScorer:
  """Scores that `search` adds to the log probabilities of texts: here none."""

  def start(self) -> Scored:
    """Returns the empty text."""
    return Scored(0.0, None)

  def extend(self, scored: Scored, label: int) -> Scored | None:
    """Returns a text and one more label; None excludes all such texts."""
    del label
    return scored

  def finish(self, scored: Scored) -> float | None:
    """Returns the score of a whole text; None excludes it."""
    return scored.score


@dataclasses.dataclass(slots=True)
class _Beginning:
  """A text of the frames so far.

  Attributes:
    scored: By the scorer.
    blank: Log probability of its alignments that end with a blank.
    label: Of those that end with a label.
  """

  scored: Scored
  blank: float = -math.inf
  label: float = -math.inf

  @property
  def log_prob(self) -> float:
    """Log probability of its alignments."""
    return _add_logs(self.blank, self.label)

  @property
  def score(self) -> float:
    """Score by which the beam is sorted."""
    return self.log_prob + self.scored.score


def _add_logs(x: float, y: float) -> float:
  if x < y:
    x, y = y, x
  return x if y == -math.inf else x + math.log1p(math.exp(y - x))


def search(
  log_probs: np.ndarray,
  *,
  beam_size: int,
  blank_id: int = 0,
  scorer: TextScorer | None = None,
  min_log_prob: float = -math.inf,
) -> list[tuple[tuple[int, ...], float]]:
  """Returns likely texts of one utterance, the most likely first.

  Prefix beam search: keeps the most likely texts of the frames so far, each
  with the sum of its alignments (Hannun et al. 2014,
  https://arxiv.org/abs/1408.2873). Runs on the host.

  Args:
    log_probs: Normalized [T,V], real frames only.
    beam_size: Number of texts that are kept after each frame.
    blank_id: Id of the blank.
    scorer: Adds scores of a language model, such as `word_search.WordScorer`.
    min_log_prob: Labels that are less likely in a frame are not tried there.

  Returns:
    At most `beam_size` pairs of ids and log probability, plus the score. With a
    beam that keeps all texts the probabilities are exact, otherwise they are
    lower bounds.

  Raises:
    ValueError: `beam_size` is not positive, or `log_probs` is no matrix.
  """
  if beam_size <= 0:
    raise ValueError(f"beam_size must be positive, got {beam_size}.")
  log_probs = np.asarray(log_probs, np.float64)
  if log_probs.ndim != 2:
    raise ValueError(f"log_probs must be [T,V], got {log_probs.shape}.")
  scorer = scorer or TextScorer()
  beam: dict[tuple[int, ...], _Beginning] = {}
  beam[()] = _Beginning(scorer.start(), blank=0.0)
  for frame in log_probs:
    beam = _advance(beam, frame.tolist(), blank_id, scorer, min_log_prob)
    kept = sorted(beam.items(), key=lambda x: (-x[1].score, x[0]))
    beam = dict(kept[:beam_size])
  found = []
  for text, each in beam.items():
    score = scorer.finish(each.scored)
    if score is not None:
      found.append((text, each.log_prob + score))
  return sorted(found, key=lambda x: (-x[1], x[0]))


def _advance(
  beam: dict[tuple[int, ...], _Beginning],
  frame: list[float],
  blank_id: int,
  scorer: TextScorer,
  min_log_prob: float,
) -> dict[tuple[int, ...], _Beginning]:
  """Returns the texts with one more frame."""
  found: dict[tuple[int, ...], _Beginning] = {}
  labels = [
    (label, log_prob)
    for label, log_prob in enumerate(frame)
    if label != blank_id and log_prob >= min_log_prob and log_prob > -math.inf
  ]
  for text, old in beam.items():
    last, either = text[-1] if text else blank_id, old.log_prob
    same = found.setdefault(text, _Beginning(old.scored))
    same.blank = _add_logs(same.blank, either + frame[blank_id])
    for label, log_prob in labels:
      if label == last:
        same.label = _add_logs(same.label, old.label + log_prob)
      before = old.blank if label == last else either
      if before == -math.inf:
        continue
      longer = (*text, label)
      if longer not in found:
        scored = scorer.extend(old.scored, label)
        if scored is None:
          continue
        found[longer] = _Beginning(scored)
      new = found[longer]
      new.label = _add_logs(new.label, before + log_prob)
  # A blank may be impossible.
  return {text: x for text, x in found.items() if x.log_prob > -math.inf}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errors:
  """The smallest number of changes from references to hypotheses.

  Attributes:
    substitutions: Items of references that are others in the hypotheses.
    deletions: Items that are missing in the hypotheses.
    insertions: Items that are in the hypotheses only.
    length: Items of the references.
  """

  substitutions: int = 0
  deletions: int = 0
  insertions: int = 0
  length: int = 0

  @property
  def rate(self) -> float:
    """Errors per item of the references: word error rate for words.

    NaN without items; more than one is possible.
    """
    errors = self.substitutions + self.deletions + self.insertions
    return errors / self.length if self.length else float("nan")

  def __add__(self, other: "Errors") -> "Errors":
    return Errors(
      substitutions=self.substitutions + other.substitutions,
      deletions=self.deletions + other.deletions,
      insertions=self.insertions + other.insertions,
      length=self.length + other.length,
    )


def count_errors(
  reference: Sequence[object], hypothesis: Sequence[object]
) -> Errors:
  """Returns the errors of a hypothesis: words, or characters of texts.

  Of equally few errors those with the most substitutions are counted.
  """
  # (errors, insertions + deletions, insertions, deletions) of the reference so
  # far and each beginning of the hypothesis; the smallest one wins.
  before = [(i, i, i, 0) for i in range(len(hypothesis) + 1)]
  for item in reference:
    after = [(before[0][0] + 1, before[0][1] + 1, 0, before[0][3] + 1)]
    for i, other in enumerate(hypothesis):
      errors, gaps, inserted, deleted = before[i]
      same = item == other
      changed = (errors + (not same), gaps, inserted, deleted)
      errors, gaps, inserted, deleted = before[i + 1]
      without = (errors + 1, gaps + 1, inserted, deleted + 1)
      errors, gaps, inserted, deleted = after[i]
      extra = (errors + 1, gaps + 1, inserted + 1, deleted)
      after.append(min(changed, without, extra))
    before = after
  errors, gaps, inserted, deleted = before[-1]
  return Errors(
    substitutions=errors - gaps,
    deletions=deleted,
    insertions=inserted,
    length=len(reference),
  )
