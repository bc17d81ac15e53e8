"""Language models of words for the search of a recognizer's text.

`Ngrams` counts sequences; `WordModel` predicts the next word of a text from the
words before it. A word that is in no text is spelled by a second model of
characters, so every text has a probability. `WordScorer` is for `ctc.search`,
which then finds the text with the largest

  log p(text | audio) + weight * log p(words) + bonus * number of words

n-grams are interpolated by Witten and Bell's rule (1991; equation 9 of Chen and
Goodman 1999, https://doi.org/10.1006/csla.1999.0128): with c(h w) occurrences
of an item after a history, and T(h) different items after it,

  p(w | h) = (c(h w) + T(h) p(w | shorter h)) / (c(h) + T(h))
"""

import collections
from collections.abc import Callable, Hashable, Iterable, Sequence
import dataclasses
import functools
import math

from paxon.layers.speech import ctc

# Ends a word, or as the empty word a text.
_END = ""
# Begins a history.
_START = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ngrams:
  """Probabilities of the next item of a sequence.

  Attributes:
    order: Items of the longest n-gram.
    base: The probability of an item before anything is counted.
    counts: Occurrences of items by their history, of at most `order - 1` items.
    totals: Their sums.
  """

  order: int
  base: Callable[[Hashable], float]
  counts: dict[tuple[Hashable, ...], collections.Counter[Hashable]]
  totals: dict[tuple[Hashable, ...], int]

  @classmethod
  def count(
    cls,
    sequences: Iterable[Sequence[Hashable]],
    *,
    order: int,
    base: Callable[[Hashable], float],
  ) -> "Ngrams":
    """Counts the items of sequences, and their ends as the item "".

    Raises:
      ValueError: `order` is not positive.
    """
    if order <= 0:
      raise ValueError(f"order must be positive, got {order}.")
    counts = collections.defaultdict[
      tuple[Hashable, ...], collections.Counter[Hashable]
    ](collections.Counter)
    for sequence in sequences:
      items = (_START, *sequence, _END)
      for i, item in enumerate(items[1:], start=1):
        for size in range(min(order - 1, i) + 1):
          counts[items[i - size : i]][item] += 1
    totals = {history: sum(found.values()) for history, found in counts.items()}
    return cls(order=order, base=base, counts=dict(counts), totals=totals)

  def probability(self, item: Hashable, history: Sequence[Hashable]) -> float:
    """Returns the probability of an item after all items before it."""
    before = (_START, *history)
    result = self.base(item)
    for size in range(min(self.order - 1, len(before)) + 1):
      context = before[len(before) - size :]
      found = self.counts.get(context)
      if found is None:
        break
      different = len(found)
      result = (found[item] + different * result) / (
        self.totals[context] + different
      )
    return result


class WordModel:
  """The probability of a text, word by word.

  Args:
    texts: Words separated by spaces.
    symbols: All characters of words.
    order: Words of the longest n-gram.
    spelling_order: Characters of the longest n-gram of the model that spells
      words; it counts each different word once.

  Raises:
    ValueError: There is no word, a character is not in `symbols`, or an order
      is not positive.
  """

  def __init__(
    self,
    texts: Iterable[str],
    *,
    symbols: str,
    order: int = 3,
    spelling_order: int = 6,
  ):
    lines = [text.split() for text in texts]
    words = sorted({word for line in lines for word in line})
    if not words:
      raise ValueError("texts must have at least one word.")
    characters = {*symbols} - {" "}
    for word in words:
      if not characters.issuperset(word):
        raise ValueError(
          f"The word {word!r} has characters that are not in {symbols!r}."
        )
    uniform = 1 / (len(characters) + 1)
    self._spelling = Ngrams.count(
      words, order=spelling_order, base=lambda item: uniform
    )
    self._words = Ngrams.count(lines, order=order, base=self._spell)
    self._order = order
    self.log_word = functools.lru_cache(maxsize=1 << 20)(self._log_word)

  def history(self, words: Sequence[str]) -> tuple[str, ...]:
    """Returns the last words, as many as predictions look at."""
    # One more, so that they are not taken for the beginning of a text.
    return tuple(words[max(0, len(words) - self._order) :])

  def log_character(self, character: str, beginning: str) -> float:
    """Returns the log probability of the next character of an unknown word."""
    return math.log(self._spelling.probability(character, beginning))

  def _log_word(self, word: str, history: tuple[str, ...]) -> float:
    return math.log(self._words.probability(word, history))

  def _spell(self, word: Hashable) -> float:
    """Returns the probability of a word by its characters."""
    text = str(word)
    return math.prod(
      self._spelling.probability(character, text[:i])
      for i, character in enumerate([*text, _END])
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Words:
  """The words of a text so far.

  Attributes:
    done: Score of the complete words.
    history: The last of them.
    part: Beginning of the next one.
    spelled: Its log probability.
  """

  done: float = 0.0
  history: tuple[str, ...] = ()
  part: str = ""
  spelled: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WordScorer(ctc.TextScorer):
  """Scores texts by their words.

  A text neither begins nor ends with a space nor has two in a row. While a word
  is incomplete, the probability of its spelling stands for it.

  Attributes:
    model: Of the words.
    symbols: Characters of the labels 1, 2, ..., with a space.
    weight: Factor of the log probability of words.
    bonus: Added for each word; a language model alone prefers few words.
  """

  model: WordModel
  symbols: str
  weight: float = 0.5
  bonus: float = 1.0

  def start(self) -> ctc.Scored:
    """Returns the empty text."""
    return ctc.Scored(0.0, _Words())

  def extend(self, scored: ctc.Scored, label: int) -> ctc.Scored | None:
    """Returns a text and one more character; None for an empty word."""
    words, character = scored.state, self.symbols[label - 1]
    if character == " ":
      if not words.part:
        return None
      done = self._finish_word(words)
      history = self.model.history((*words.history, words.part))
      return ctc.Scored(done, _Words(done=done, history=history))
    spelled = words.spelled + self.model.log_character(character, words.part)
    state = dataclasses.replace(
      words, part=words.part + character, spelled=spelled
    )
    return ctc.Scored(words.done + self.weight * spelled, state)

  def finish(self, scored: ctc.Scored) -> float | None:
    """Returns the score of a whole text; None if it ends with a space."""
    words = scored.state
    if not words.part:
      is_empty = not words.history
      return self._end((), 0.0) if is_empty else None
    history = self.model.history((*words.history, words.part))
    return self._end(history, self._finish_word(words))

  def _finish_word(self, words: _Words) -> float:
    log_prob = self.model.log_word(words.part, words.history)
    return words.done + self.weight * log_prob + self.bonus

  def _end(self, history: tuple[str, ...], done: float) -> float:
    return done + self.weight * self.model.log_word(_END, history)
