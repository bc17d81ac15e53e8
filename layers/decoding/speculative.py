"""Speculative decoding: cheap drafts of several ids, verified by one step.

  d[1..k] = draft(the sequence so far)
  logits[0..k] = decode_step(cache, [last, d[1], ..., d[k]])
  for i = 1, 2, ...: id[i] ~ p(logits[i - 1]), accept d[i], or stop after id[i]
  the cache forgets the rejected ids

Greedy ids are those of `generate.generate`. With samples of a draft model the
id `d` from its distribution `q` is accepted with probability min(1, p / q), and
otherwise replaced by a draw from max(p - q, 0), normalized, so that ids have
the distribution `p` of the settings (Leviathan et al. 2023,
https://arxiv.org/abs/2211.17192). The settings change `q` in the same way.

A drafted id without a distribution is accepted if the draw of plain generation
is this id. This is the same rule for a `q` with one possible id, and it gives
the ids of `generate.generate` with the same seeds.

Each sequence accepts its own number of ids. Both models need caches with an
index for each sequence (`cache_rows.with_row_index`).

Letters: R sequences, P prompt length, k drafted ids, V vocab, S length.
"""

from collections.abc import Collection
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from paxon.layers.decoding import cache_rows, samplers, sampling
from paxon.layers.decoding import generate as generate_lib
from paxon.sharding import checks

# fold_in tags of speculative decoding.
_ACCEPT, _REPLACE, _DRAFT = 1, 2, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
  """Drafts what followed the last ids earlier in the sequence.

  Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding. The
  longest match counts, and the latest of several. A draft that reaches the end
  of the sequence continues with its own beginning.

  Attributes:
    num_tokens: Number of drafted ids.
    max_ngram: Maximum number of last ids that are looked up.
  """

  num_tokens: int = 8
  max_ngram: int = 3

  def __post_init__(self) -> None:
    checks.check_size(self, "num_tokens", "max_ngram")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
  """Drafts with a smaller model of the same vocabulary.

  Attributes:
    prefill: Reads the prompts and creates the cache of the draft model.
    decode_step: Appends ids to it.
    num_tokens: Number of drafted ids.
  """

  prefill: generate_lib.Prefill
  decode_step: generate_lib.DecodeStep
  num_tokens: int = 4

  def __post_init__(self) -> None:
    checks.check_size(self, "num_tokens")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
  """Generated tokens, and how they came about.

  Attributes:
    generation: The tokens.
    num_steps: int32 [R]; steps of the model while the sequence was generated,
      without the prefill. The largest one is that of the batch.
    num_drafted: int32 [R]; number of ids that were drafted.
    num_accepted: int32 [R]; how many of them were accepted.
  """

  generation: generate_lib.Generation
  num_steps: jax.Array
  num_drafted: jax.Array
  num_accepted: jax.Array

  @property
  def acceptance(self) -> jax.Array:
    """float32 [R]; rate of accepted ids, 0 where none was drafted."""
    drafted = jnp.maximum(self.num_drafted, 1).astype(jnp.float32)
    return self.num_accepted.astype(jnp.float32) / drafted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
  """Loop state.

  `step` [R] is the number of generated ids, `last` [R] the last of them, which
  is not in the cache. `history` is None without settings. `drafter` is that of
  the drafts.
  """

  step: jax.Array
  last: jax.Array
  done: jax.Array
  history: sampling.History | None
  cache: Any
  drafter: Any
  result: Speculation


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Drafts:
  """Drafted ids [R,k], and the log probabilities [R,k,V] that they have."""

  ids: jax.Array
  log_probs: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rule:
  """How ids are chosen; `settings` is None for the most likely ids.

  `limits` [R] are the maximum numbers of ids.
  """

  settings: sampling.BatchSettings | None
  key: jax.Array
  end_ids: tuple[int, ...]
  limits: jax.Array

  def weights(
    self, logits: jax.Array, history: sampling.History, step: jax.Array
  ) -> jax.Array:
    """Returns the log probabilities [R,V] of the settings."""
    assert self.settings is not None
    weights = self.settings.log_weights(logits, history, step, self.end_ids)
    return jax.nn.log_softmax(weights, axis=-1)

  def draw(self, logits: jax.Array, state: _State) -> jax.Array:
    """Returns the ids [R] of plain generation."""
    if self.settings is None:
      return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    assert state.history is not None
    return self.settings.draw(
      logits, self.key, state.history, state.step, self.end_ids
    )

  def draft(
    self, logits: jax.Array, history: sampling.History, step: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns ids [R] of a draft model, and all log probabilities [R,V]."""
    log_q = self.weights(logits, history, step)
    drawn = self._categorical(_DRAFT, step, log_q)
    return self._or_best(drawn, log_q), log_q

  def replace(
    self,
    logits: jax.Array,
    state: _State,
    draft: jax.Array,
    log_q: jax.Array,
    drafted: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns ids [R], and whether the draft was accepted, bool [R]."""
    assert self.settings is not None
    assert state.history is not None
    log_p = self.weights(logits, state.history, state.step)
    keys = self.settings.keys(self.key, state.step)
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, _ACCEPT)
    uniform = jax.vmap(jax.random.uniform)(keys)
    of_draft = functools.partial(
      jnp.take_along_axis, indices=draft[:, None], axis=-1
    )
    p, q = (jnp.exp(of_draft(x)[:, 0]) for x in (log_p, log_q))
    excess = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0)
    # Without excess but for rounding both distributions are the same.
    is_any = jnp.any(excess > 0, axis=-1) & drafted
    left = jnp.where(is_any[:, None], jnp.log(excess), log_p)
    other = self._categorical(_REPLACE, state.step, left)
    accepted = drafted & (uniform * q < p)
    best = jnp.argmax(log_p, axis=-1).astype(jnp.int32)
    greedy = self.settings.temperature <= 0
    ids = jnp.where(greedy, best, jnp.where(accepted, draft, other))
    return ids, drafted & jnp.where(greedy, best == draft, accepted)

  def _categorical(
    self, role: int, step: jax.Array, log_probs: jax.Array
  ) -> jax.Array:
    assert self.settings is not None
    keys = self.settings.keys(self.key, step)
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, role)
    drawn = jax.vmap(jax.random.categorical)(keys, log_probs)
    return drawn.astype(jnp.int32)

  def _or_best(self, drawn: jax.Array, weights: jax.Array) -> jax.Array:
    assert self.settings is not None
    best = jnp.argmax(weights, axis=-1).astype(jnp.int32)
    return jnp.where(self.settings.temperature > 0, drawn, best)


def generate(
  prefill: generate_lib.Prefill,
  decode_step: generate_lib.DecodeStep,
  prompts: Int[Array, "batch prompt_length"],
  prompt_lengths: Int[Array, " sequences"],
  *,
  draft: PromptLookup | DraftModel,
  sampler: samplers.Sampler | sampling.BatchSettings,
  key: Key[Array, ""],
  max_new_tokens: int,
  end_id: int | Collection[int] | None = None,
  num_samples: int = 1,
  num_alternatives: int = 0,
  repeat: generate_lib.Repeat = cache_rows.share,
) -> Speculation:
  """Generates a continuation of each prompt, independent of other prompts.

  Other arguments are those of `generate.generate`.

  Args:
    prefill: Reads the prompts and creates the cache.
    decode_step: Appends several ids to each sequence.
    prompts: Ids, padded on the right with anything.
    prompt_lengths: Number of ids of each prompt, from 1 to P.
    draft: Proposes ids.
    sampler: Selects the most likely ids, or settings of each sequence.
    key: Random key.
    max_new_tokens: Maximum number of generated ids.
    end_id: Id, or ids, that end a sequence.
    num_samples: Number of continuations of each prompt.
    num_alternatives: Number of most likely ids to return for each step.
    repeat: Makes the cache of samples from that of their prompts.

  Raises:
    ValueError: See `generate.generate`; the vocabulary of a draft model is
      another, or a cache cannot forget ids.
  """
  if not isinstance(sampler, samplers.Greedy | sampling.BatchSettings):
    raise ValueError(
      "speculative.generate needs the sampler Greedy or BatchSettings, got"
      f" {type(sampler).__name__}."
    )
  generate_lib.check_prompts(
    prompts, prompt_lengths, max_new_tokens, num_samples
  )
  empty = generate_lib.empty(
    prompts.shape[0] * num_samples, max_new_tokens, num_alternatives
  )
  read = functools.partial(
    generate_lib.read_samples,
    prompts=prompts,
    prompt_lengths=prompt_lengths,
    max_new_tokens=max_new_tokens,
    num_samples=num_samples,
    repeat=repeat,
  )
  at_end, cache, lengths = read(prefill)
  cache = cache_rows.with_row_index(cache)
  prompts = jnp.repeat(prompts.astype(jnp.int32), num_samples, axis=0)
  rule = _make_rule(sampler, key, end_id, empty)
  # More could not be accepted.
  count = max(1, min(draft.num_tokens, max_new_tokens - 1))
  drafter: _Lookup | _Model
  if isinstance(draft, PromptLookup):
    drafter = _Lookup(count, draft.max_ngram, lengths)
    draft_state = drafter.begin(prompts, max_new_tokens)
  else:
    drafter = _Model(count, draft, lengths, rule)
    draft_state = drafter.begin(read, at_end.shape[-1])
  history = None
  if rule.settings is not None:
    history = sampling.begin(prompts, lengths, at_end.shape[-1])
  state = _make_state(cache, draft_state, history, empty)
  ids = rule.draw(at_end[:, 0], state)
  state = _append(state, ids, at_end[:, 0], ~state.done, rule)

  def body(state: _State) -> _State:
    return _round(state, decode_step, drafter, rule, lengths)

  return jax.lax.while_loop(
    lambda state: ~jnp.all(state.done), body, state
  ).result


def _make_rule(
  sampler: samplers.Sampler | sampling.BatchSettings,
  key: jax.Array,
  end_id: int | Collection[int] | None,
  empty: generate_lib.Generation,
) -> _Rule:
  """Returns the rule that generates as many ids as `empty` has room for."""
  num_sequences, max_new_tokens = empty.ids.shape
  settings = sampler if isinstance(sampler, sampling.BatchSettings) else None
  limits = jnp.full((num_sequences,), max_new_tokens)
  if settings is not None:
    limits = jnp.minimum(limits, settings.max_new_tokens)
  return _Rule(
    settings=settings,
    key=key,
    end_ids=() if end_id is None else generate_lib.to_end_ids(end_id),
    limits=limits,
  )


def _make_state(
  cache: Any,
  drafter: Any,
  history: sampling.History | None,
  empty: generate_lib.Generation,
) -> _State:
  """Returns the state before the first id."""
  zeros = jnp.zeros(empty.lengths.shape, jnp.int32)
  return _State(
    step=zeros,
    last=zeros,
    done=zeros > 0,
    history=history,
    cache=cache,
    drafter=drafter,
    result=Speculation(
      generation=empty, num_steps=zeros, num_drafted=zeros, num_accepted=zeros
    ),
  )


def _round(
  state: _State,
  decode_step: generate_lib.DecodeStep,
  drafter: "_Lookup | _Model",
  rule: _Rule,
  lengths: jax.Array,
) -> _State:
  """Drafts ids, verifies them and appends at least one to each sequence."""
  k, before = drafter.count, state
  room = jnp.where(state.done, 0, rule.limits - state.step)
  # The last id before the limit needs no draft.
  num_drafted = jnp.clip(room - 1, 0, k)
  drafts, draft_state = drafter.propose(state, num_drafted)
  fed = num_drafted + (~state.done).astype(jnp.int32)
  at = jnp.arange(k + 1, dtype=jnp.int32)[None]
  is_real = at < fed[:, None]
  first = lengths + state.step - 1
  # Ids that cannot be accepted are padding, which takes no slot of the cache.
  logits, cache = decode_step(
    state.cache,
    jnp.concatenate([state.last[:, None], drafts.ids], axis=1),
    jnp.where(is_real, first[:, None] + at, 0),
    is_real.astype(jnp.int32),
  )
  state, num_accepted = _verify(state, logits, drafts, num_drafted, rule)
  # The last new id is not in the cache.
  num_new = state.step - before.step
  cache = cache_rows.rewind(cache, before.cache, fed, num_new, most=k + 1)
  result = dataclasses.replace(
    state.result,
    num_steps=state.result.num_steps + (~before.done).astype(jnp.int32),
    num_drafted=state.result.num_drafted + num_drafted,
    num_accepted=state.result.num_accepted + num_accepted,
  )
  draft_state = drafter.settle(
    before, draft_state, drafts.ids, num_drafted, state
  )
  return dataclasses.replace(
    state, cache=cache, drafter=draft_state, result=result
  )


def _verify(
  state: _State,
  logits: jax.Array,
  drafts: _Drafts,
  num_drafted: jax.Array,
  rule: _Rule,
) -> tuple[_State, jax.Array]:
  """Appends accepted drafts and one more id; also counts the drafts, [R].

  `logits` [R,k+1,V] follow the last id and the drafts.
  """
  k = drafts.ids.shape[1]

  def verify_one(carry: Any) -> Any:
    i, state, alive, num_accepted = carry
    own = jax.lax.dynamic_index_in_dim(logits, i, 1, keepdims=False)
    number = jnp.minimum(i, k - 1)
    draft = jax.lax.dynamic_index_in_dim(drafts.ids, number, 1, False)
    drafted = i < num_drafted
    if drafts.log_probs is None:
      ids = rule.draw(own, state)
      accepted = drafted & (ids == draft)
    else:
      log_q = jax.lax.dynamic_index_in_dim(drafts.log_probs, number, 1, False)
      ids, accepted = rule.replace(own, state, draft, log_q, drafted)
    state = _append(state, ids, own, alive, rule)
    accepted &= alive
    num_accepted += accepted.astype(jnp.int32)
    return i + 1, state, accepted & ~state.done, num_accepted

  _, state, _, num_accepted = jax.lax.while_loop(
    lambda carry: (carry[0] <= k) & jnp.any(carry[2]),
    verify_one,
    (jnp.int32(0), state, ~state.done, jnp.zeros_like(num_drafted)),
  )
  return state, num_accepted


def _append(
  state: _State,
  ids: jax.Array,
  logits: jax.Array,
  alive: jax.Array,
  rule: _Rule,
) -> _State:
  """Appends one id to each sequence that is alive."""
  found = state.result.generation
  generation = generate_lib.with_step(
    found, ids, logits, jnp.where(alive, state.step, found.ids.shape[1])
  )
  is_end = jnp.zeros_like(alive)
  for end_id in rule.end_ids:
    is_end |= ids == end_id
  is_nan = generate_lib.find_nan(logits)
  step = state.step + alive.astype(jnp.int32)
  generation = dataclasses.replace(
    generation, lengths=step, ended=found.ended | (is_end & alive)
  )
  history = state.history
  return dataclasses.replace(
    state,
    step=step,
    last=jnp.where(alive, ids, state.last),
    done=state.done | (alive & (is_end | is_nan | (step >= rule.limits))),
    history=None if history is None else history.add(ids, alive),
    result=dataclasses.replace(state.result, generation=generation),
  )


@dataclasses.dataclass(frozen=True)
class _Lookup:
  """`PromptLookup`; its state are all ids of the sequence, int32 [R,S]."""

  count: int
  max_ngram: int
  lengths: jax.Array

  def begin(self, prompts: jax.Array, max_new_tokens: int) -> jax.Array:
    return jnp.pad(prompts, ((0, 0), (0, max_new_tokens)))

  def propose(
    self, state: _State, num_drafted: jax.Array
  ) -> tuple[_Drafts, jax.Array]:
    del num_drafted
    sequences = jnp.arange(state.last.shape[0])
    end = self.lengths + state.step  # With the last id.
    ids = state.drafter.at[sequences, end - 1].set(state.last)
    return _Drafts(ids=self._look_up(ids, end)), ids

  def _look_up(self, ids: jax.Array, end: jax.Array) -> jax.Array:
    size = ids.shape[1]
    at = jnp.arange(size, dtype=jnp.int32)[None]
    # Number of ids up to `at` that equal the last ones.
    matches, is_match = jnp.zeros_like(ids), at < end[:, None] - 1
    for i in range(self.max_ngram):
      last = jnp.take_along_axis(ids, jnp.maximum(end - 1 - i, 0)[:, None], 1)
      shifted = jnp.pad(ids, ((0, 0), (i, 0)))[:, :size]
      is_match &= (shifted == last) & (at >= i)
      matches += is_match.astype(jnp.int32)
    best = jnp.argmax(jnp.where(matches > 0, matches * size + at, 0), axis=1)
    # Without a match any ids will do.
    start = best.astype(jnp.int32)[:, None] + 1
    period = jnp.maximum(end[:, None] - start, 1)
    offset = jnp.arange(self.count, dtype=jnp.int32)[None] % period
    return jnp.take_along_axis(ids, jnp.minimum(start + offset, size - 1), 1)

  def settle(
    self,
    before: _State,
    ids: jax.Array,
    drafts: jax.Array,
    num_drafted: jax.Array,
    after: _State,
  ) -> jax.Array:
    """Appends the new ids."""
    del drafts, num_drafted
    new = after.result.generation.ids
    sequences = jnp.arange(ids.shape[0])[:, None]
    offset = jnp.arange(self.count + 1, dtype=jnp.int32)[None]
    step = before.step[:, None] + offset
    at = jnp.where(step < after.step[:, None], step, ids.shape[1])
    values = jnp.take_along_axis(new, jnp.minimum(step, new.shape[1] - 1), 1)
    return ids.at[sequences, self.lengths[:, None] + at].set(
      values, mode="drop"
    )


@dataclasses.dataclass(frozen=True)
class _Model:
  """`DraftModel`; its state is a cache and an id that is not yet in it.

  The id is that before the last one, where a whole draft was accepted.
  """

  count: int
  model: DraftModel
  lengths: jax.Array
  rule: _Rule

  def begin(self, read: Any, vocab_size: int) -> Any:
    at_end, cache, lengths = read(self.model.prefill)
    cache = cache_rows.with_row_index(cache)
    if at_end.shape[-1] != vocab_size:
      raise ValueError(
        "DraftModel must have the vocabulary of the model,"
        f" {vocab_size} ids, got {at_end.shape[-1]}."
      )
    return cache, jnp.zeros_like(lengths), lengths < 0

  def propose(
    self, state: _State, num_drafted: jax.Array
  ) -> tuple[_Drafts, Any]:
    cache, pending, is_pending = state.drafter
    position = self.lengths + state.step - 1
    active = num_drafted > 0
    real = jnp.stack([active & is_pending, active], axis=1)
    positions = jnp.stack([position - 1, position], axis=1)
    logits, cache = self.model.decode_step(
      cache,
      jnp.stack([pending, state.last], axis=1),
      jnp.where(real, positions, 0),
      real.astype(jnp.int32),
    )
    first = logits[:, 1].astype(jnp.float32)

    def choose(logits: jax.Array, history: Any, i: jax.Array) -> Any:
      if history is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), None, None
      ids, log_q = self.rule.draft(logits, history, state.step + i)
      return ids, log_q, history.add(ids, i < num_drafted)

    def extend(carry: Any, i: jax.Array) -> Any:
      cache, ids, history = carry
      real = i < num_drafted
      logits, cache = self.model.decode_step(
        cache,
        ids[:, None],
        jnp.where(real, position + i, 0)[:, None],
        real.astype(jnp.int32)[:, None],
      )
      ids, log_q, history = choose(logits[:, 0], history, i)
      return (cache, ids, history), (ids, log_q)

    ids, log_q, history = choose(first, state.history, jnp.int32(0))
    (cache, _, _), others = jax.lax.scan(
      extend,
      (cache, ids, history),
      jnp.arange(1, self.count, dtype=jnp.int32),
    )
    ids, log_q = jax.tree.map(
      lambda x, xs: jnp.moveaxis(jnp.concatenate([x[None], xs]), 0, 1),
      (ids, log_q),
      others,
    )
    return _Drafts(ids=ids, log_probs=log_q), (cache, pending, is_pending)

  def settle(
    self,
    before: _State,
    drafter: Any,
    drafts: jax.Array,
    num_drafted: jax.Array,
    after: _State,
  ) -> Any:
    """Forgets rejected ids."""
    cache, _, was_pending = drafter
    num_new = after.step - before.step
    more = (was_pending & (num_drafted > 0)).astype(jnp.int32)
    cache = cache_rows.rewind(
      cache,
      before.drafter[0],
      num_drafted + more,
      jnp.minimum(num_new, num_drafted) + more,
      most=self.count + 1,
    )
    last = jnp.maximum(num_drafted - 1, 0)[:, None]
    return (
      cache,
      jnp.take_along_axis(drafts, last, axis=1)[:, 0],
      (num_new > num_drafted) & (num_drafted > 0),
    )
