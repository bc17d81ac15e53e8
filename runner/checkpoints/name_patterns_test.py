"""Tests for patterns of names."""

import pytest

from paxon.runner.checkpoints import name_patterns
from paxon.runner.settings import training

TARGETS = (
  "params/embedding/table",
  "params/stack/layers/blocks_0/attention/query",
  "params/stack/layers/blocks_0/attention/key",
  "params/head/kernel",
)


def _match(patterns, sources=TARGETS, targets=TARGETS):
  return name_patterns.match(
    targets, sources, patterns=patterns, field="patterns"
  )


def test_without_patterns_names_stay():
  matching = _match((), sources=(*TARGETS[:3], "params/old/bias"))
  assert matching.sources == {name: name for name in TARGETS[:3]}
  assert matching.absent == {TARGETS[3]: TARGETS[3]}
  assert matching.unused == ("params/old/bias",)
  assert matching.initial == ()


def test_the_first_pattern_that_matches_holds():
  patterns = (
    (r"params/stack/(.*)/query", r"params/decoder/\1/q"),
    (r"params/(?P<part>stack)/(.*)", r"params/\g<part>_\2"),
    (r"params/head/.*", None),
  )
  sources = (
    "params/decoder/layers/blocks_0/attention/q",
    "params/stack_layers/blocks_0/attention/key",
    "params/head/kernel",
  )
  matching = _match(patterns, sources)
  assert matching.sources == {TARGETS[1]: sources[0], TARGETS[2]: sources[1]}
  assert matching.initial == ("params/head/kernel",)
  assert matching.unused == ("params/head/kernel",)
  assert matching.absent == {TARGETS[0]: TARGETS[0]}
  assert matching.uses == (1, 1, 1)


def test_an_expression_must_match_the_whole_name():
  with pytest.raises(training.PatternError, match="matches no variable"):
    _match(((r"params/head", None),))


def test_one_source_may_fill_two_targets():
  matching = _match(((r"(.*)/key", r"\1/query"),))
  assert matching.sources[TARGETS[2]] == TARGETS[1]
  assert matching.unused == (TARGETS[2],)


@pytest.mark.parametrize(
  ("pattern", "message"),
  [
    pytest.param(("params/(", None), r"not a regular expression", id="regex"),
    pytest.param((r"a(.)", r"\2"), r"invalid group reference 2", id="group"),
    pytest.param((r"a(.)", r"\g<b>"), r"unknown group name 'b'", id="name"),
    pytest.param((r"a(.)", r"\q"), r"bad escape", id="escape"),
    pytest.param(("a", ""), r"empty template", id="empty"),
    pytest.param(("a", 1), r"patterns\[0\] must be a pair", id="type"),
    pytest.param(("a",), r"patterns\[0\] must be a pair", id="single"),
  ],
)
def test_what_is_wrong_in_itself_is_refused(pattern, message):
  with pytest.raises(training.PatternError, match=message):
    training.check_patterns((pattern,), field="patterns")


@pytest.mark.parametrize(
  ("expression", "close"),
  [
    ("params/haed/kernel", "params/head/kernel"),
    ("params/heads/.*", "params/head/kernel"),
    (r"params/stack/layers/blocks_0/atention/(query|key)", "attention/"),
    (r"decoder/attention/.*", "attention/"),
  ],
)
def test_a_pattern_without_a_match_names_the_closest(expression, close):
  with pytest.raises(
    training.PatternError,
    match=rf"patterns\[0\] .* matches no variable .*closest name is .*{close}",
  ):
    _match(((expression, None),))


def test_a_pattern_behind_another_is_refused():
  with pytest.raises(
    training.PatternError,
    match=r"patterns\[1\] .* has no effect: .*head/kernel.*'params/\(\.\*\)'",
  ):
    _match(((r"params/(.*)", r"params/\1"), (r"params/head/.*", None)))


def test_expressions_that_match_are_ticked_off():
  unused = {"a.*", "b"}
  assert name_patterns.matches_any("ab", ["a.*", "b"], unused=unused)
  assert unused == {"b"}
  assert not name_patterns.matches_any("ca", ["a.*", "b"], unused=unused)
