"""Tests for suggestions of close names."""

import pytest

from paxon.sharding import suggestions

_NAMES = ["seed", "mesh", "num_train_steps", "PythonStdlibLm"]


@pytest.mark.parametrize(
  ("word", "closest"),
  [
    ("sede", ["seed"]),
    ("SEED", ["seed"]),
    ("pythonstdliblm", ["PythonStdlibLm"]),
    ("num_trian_steps", ["num_train_steps"]),
    ("zzz", []),
    ("", []),
  ],
)
def test_closest_name_is_found_ignoring_case(word, closest):
  assert suggestions.find_closest(word, _NAMES) == closest


def test_suggestion_names_the_closest_or_all_known():
  assert suggestions.suggest("sede", _NAMES) == "; did you mean 'seed'?"
  assert suggestions.suggest("ab", ["abc", "abd"], count=2).count("'") == 4
  assert suggestions.suggest("zzz", ["b", "a"]) == "; known: a, b."
  assert suggestions.suggest("zzz", []) == "; none are known."
  many = suggestions.suggest("zzz", [f"name{i:02}" for i in range(20)])
  assert many.endswith("name07, ...")
