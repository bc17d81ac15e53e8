"""Tests for mixtures: quotas, changes by step, ends, and errors."""

import fractions

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream, mixture


def _leaf(size=4, *, first=0, num_epochs=None):
  runs = [np.array([first + i, 7], np.int32) for i in range(size)]
  return example_stream.Examples(
    source=example_source.InMemoryExamples(runs),
    shuffle_seed=None,
    num_epochs=num_epochs,
  )


def _names(mixed, count, *, step=lambda k: 0):
  """Returns the members of the first draws, and their counts."""
  names, position = [], mixed.start()
  for k in range(count):
    found = mixed.next_example(position, step=step(k))
    if found is None:
      break
    (name, _), position = found
    names.append(name)
  return names


def test_order_matches_example_by_hand():
  mixed = mixture.Mixture(
    members={"a": _leaf(), "b": _leaf()}, weights={"a": 3.0, "b": 1.0}
  )
  assert "".join(_names(mixed, 8)) == "aabaaaba"


@hypothesis.settings(max_examples=20)
@hypothesis.given(
  weights=st.lists(
    st.floats(0.01, 100, allow_nan=False), min_size=1, max_size=6
  )
)
def test_quotas_hold_after_every_draw(weights):
  names = [str(i) for i in range(len(weights))]
  mixed = mixture.Mixture(
    members={name: _leaf() for name in names},
    weights=dict(zip(names, weights, strict=True)),
  )
  total = sum(map(fractions.Fraction, weights))
  counts = dict.fromkeys(names, 0)
  for k, name in enumerate(_names(mixed, 50), start=1):
    counts[name] += 1
    for other, weight in zip(names, weights, strict=True):
      quota = k * fractions.Fraction(weight) / total
      assert abs(counts[other] - quota) < 1, (k, other)


def test_weights_change_at_a_batch():
  mixed = mixture.Mixture(
    members={"a": _leaf(), "b": _leaf(), "c": _leaf()},
    weights={"a": 1.0, "b": 1.0, "c": 0.0},
    weight_changes={10: {"a": 0.0, "b": 1.0, "c": 3.0}},
  )
  # Ten draws per batch.
  names = _names(mixed, 200, step=lambda k: k // 10)
  before, after = names[:100], names[100:]
  assert {name: before.count(name) for name in "abc"} == {
    "a": 50,
    "b": 50,
    "c": 0,
  }
  counts = {name: after.count(name) for name in "abc"}
  assert counts["a"] == 0
  assert abs(counts["c"] - 75) <= 1


def test_members_share_the_weight_of_an_ended_member():
  mixed = mixture.Mixture(
    members={
      "a": _leaf(6, num_epochs=1),
      "b": _leaf(2, num_epochs=1),
      "c": _leaf(1, num_epochs=2),
    },
    # With weight 0, "c" is read after the others have ended.
    weights={"a": 1.0, "b": 1.0, "c": 0.0},
    weight_changes={10**6: {"a": 1.0, "b": 1.0, "c": 1.0}},
  )
  names = "".join(_names(mixed, 100))
  assert names == "ababaaaacc"
  assert not mixed.is_endless
  assert mixture.Mixture(members={"a": _leaf()}).is_endless


def test_messages_name_the_member():
  mixed = mixture.Mixture(members={"a": _leaf(), "b": _leaf(0)})
  assert mixed.name(["a", 3]) == "example 3 of 'a'"
  with pytest.raises(ValueError, match=r"member 'b': The source holds no"):
    mixed.check_readable()


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"members": {}}, r"members must not be empty"),
    ({"weights": {"a": 1.0}}, r"must be of the members \['a', 'b'\], got"),
    ({"weights": {"a": 0.0, "b": 0.0}}, r"batch 0 are all 0"),
    (
      {"weights": {"a": 1.0, "b": 0.0}},
      r"'b' has the weight 0 in every batch, so it would never be read",
    ),
    ({"weights": {"a": -1.0, "b": 1.0}}, r"from 0 on, got -1.0 for 'a'"),
    ({"weights": {"a": float("nan"), "b": 1.0}}, r"got nan for 'a'"),
    (
      {"weight_changes": {0: {"a": 1.0, "b": 1.0}}},
      r"at batch 1 or later .* got 0",
    ),
    ({"weight_changes": {5: {"a": 1.0}}}, r"batch 5 must be of the members"),
  ],
)
def test_rejects_invalid_fields(kwargs, message):
  members = {"a": _leaf(), "b": _leaf()}
  with pytest.raises(ValueError, match=message):
    mixture.Mixture(**{"members": members} | kwargs)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"members": {"a": 0}}, r"must have the members \['a', 'b'\]"),
    ({"ended": ["x"]}, r"position is damaged"),
    ({"due": {"a": 0, "b": 0.5}}, r"position is damaged"),
    ({"members": {"a": 0, "b": -1}}, r"must be an integer, got -1"),
  ],
)
def test_rejects_damaged_positions(change, message):
  mixed = mixture.Mixture(members={"a": _leaf(), "b": _leaf()})
  mixed.check(mixed.start())
  with pytest.raises(ValueError, match=message):
    mixed.check({**mixed.start(), **change})
