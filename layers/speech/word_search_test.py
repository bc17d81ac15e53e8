import itertools
import math

import numpy as np
import pytest

from paxon.layers.speech import ctc, word_search

_SYMBOLS = " ab"


def _strings(longest, symbols="ab"):
  for size in range(longest + 1):
    yield from map("".join, itertools.product(symbols, repeat=size))


def _model(order=2, spelling_order=2):
  texts = ["ab b", "a  b", "b", ""]
  return word_search.WordModel(
    texts, symbols=_SYMBOLS, order=order, spelling_order=spelling_order
  )


def _by_definition(sequences, item, history, order, base):
  """Witten and Bell's rule, from lists of n-grams."""
  padded = [["<", *s, ">"] for s in sequences]
  before = ["<", *history]

  def probability(context):
    shorter = probability(context[1:]) if context else base
    n = len(context)
    after = [
      s[i + n]
      for s in padded
      for i in range(max(0, 1 - n), len(s) - n)
      if s[i : i + n] == context
    ]
    different = len(set(after))
    if not after:
      return shorter
    count = after.count(item)
    return (count + different * shorter) / (len(after) + different)

  return probability(before[max(0, len(before) - order + 1) :])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_ngrams_by_definition(order):
  sequences = ["abab", "bba", "b", "aab"]
  ngrams = word_search.Ngrams.count(sequences, order=order, base=lambda _: 0.25)
  for history in ["", "a", "ab", "bb", "bab", "aaa"]:
    for item in "abc":
      expected = _by_definition(sequences, item, history, order, 0.25)
      found = ngrams.probability(item, tuple(history))
      assert found == pytest.approx(expected, rel=1e-12)
    expected = _by_definition(sequences, ">", history, order, 0.25)
    assert ngrams.probability("", tuple(history)) == pytest.approx(expected)


@pytest.mark.parametrize("history", [(), ("a",), ("new", "b"), ("b", "b")])
def test_words_known_or_not_sum_to_one(history):
  model = _model(order=3)
  total = sum(math.exp(model.log_word(w, history)) for w in _strings(11))
  assert total == pytest.approx(1, abs=1e-6)


def _log_text(model, text):
  """Returns the log probability of a whole text."""
  words = text.split()
  return sum(
    model.log_word(word, model.history(words[:i]))
    for i, word in enumerate([*words, ""])
  )


def test_a_text_is_the_sum_of_its_words():
  model = _model()
  expected = (
    model.log_word("b", ())
    + model.log_word("ba", ("b",))
    + model.log_word("", ("b", "ba"))
  )
  assert _log_text(model, "b ba") == pytest.approx(expected)
  assert _log_text(model, "ab b") > _log_text(model, "ba a")


def test_a_wide_search_has_the_scores_of_all_texts():
  log_probs = np.log(np.random.default_rng(0).dirichlet(np.ones(4), 5))
  model = _model(order=3, spelling_order=3)
  scorer = word_search.WordScorer(
    model=model, symbols=_SYMBOLS, weight=0.7, bonus=0.3
  )
  audio = dict(ctc.search(log_probs, beam_size=10_000))
  expected = {}
  for ids, log_prob in audio.items():
    text = "".join(_SYMBOLS[i - 1] for i in ids)
    if text == " ".join(text.split()):
      words = 0.7 * _log_text(model, text) + 0.3 * len(text.split())
      expected[ids] = log_prob + words
  found = ctc.search(log_probs, beam_size=10_000, scorer=scorer)
  assert dict(found) == pytest.approx(expected, rel=1e-12)
  assert found[0][0] == max(expected, key=expected.__getitem__)


def test_words_decide_where_the_audio_does_not():
  # "a", then a little more likely "a" than "b".
  log_probs = np.log(
    [
      [0.01, 0.01, 0.97, 0.01],
      [0.97, 0.01, 0.01, 0.01],
      [0.02, 0.01, 0.55, 0.42],
    ]
  )
  model = word_search.WordModel(["ab", "ab b"], symbols=_SYMBOLS)
  scorer = word_search.WordScorer(model=model, symbols=_SYMBOLS)
  assert ctc.search(log_probs, beam_size=8)[0][0] == (2, 2)
  assert ctc.search(log_probs, beam_size=8, scorer=scorer)[0][0] == (2, 3)


def test_unlikely_labels_are_not_tried():
  log_probs = np.log([[0.5, 0.4, 0.1]] * 2)
  found = ctc.search(log_probs, beam_size=100, min_log_prob=math.log(0.2))
  assert {ids for ids, _ in found} == {(), (1,)}


def test_errors():
  with pytest.raises(ValueError, match="order must be positive, got 0"):
    word_search.WordModel(["a"], symbols=_SYMBOLS, order=0)
  with pytest.raises(ValueError, match="at least one word"):
    word_search.WordModel(["", " "], symbols=_SYMBOLS)
  with pytest.raises(ValueError, match="'abc' has characters that are not in"):
    word_search.WordModel(["b abc"], symbols=_SYMBOLS)
