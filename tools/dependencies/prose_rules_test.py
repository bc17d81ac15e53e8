"""Headless docstrings, functions without a verb and stray words are caught."""

import pytest

from paxon.tools.dependencies import planted, prose_rules, violation

_HEADLESS = (
  "its docstring has a headless relative; name the thing: `Returns the kernel"
  " of each matmul.`"
)
_NO_VERB = (
  "a function's name begins with a verb, as in `pad_slots` or `get_settings`."
)


@pytest.mark.parametrize(
  ("source", "message"),
  [
    (
      'def f():\n  """Returns what a step needs."""\n',
      f"runner/task.py:1: f: {_HEADLESS}",
    ),
    (
      'class A:\n  """A.\n\n  Attributes:\n    b: Those of a run.\n  """\n',
      f"runner/task.py:1: A: {_HEADLESS}",
    ),
    ('"""That of a run."""\n', f"runner/task.py:1: {_HEADLESS}"),
    ("def settings_of(x): ...\n", f"runner/task.py:1: settings_of: {_NO_VERB}"),
    (
      "class A:\n  async def _padded(self): ...\n",
      f"runner/task.py:2: _padded: {_NO_VERB}",
    ),
    (
      "# XX\n",
      "runner/task.py:1: stray `XX`; remove it, or name an owner:"
      " `TODO(name)`.",
    ),
  ],
)
def test_catches_the_planted_violation(source, message, tmp_path):
  assert planted.found_by(
    prose_rules.check, tmp_path, {"runner/task.py": source}
  ) == [message]


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"runner/task.py": "# TODO(ada): a word with an owner.\n"},
    {
      "runner/task.py": (
        "class A:\n  @property\n  def used(self): ...\n"
        "\n@functools.cached_property\ndef merged(): ...\n"
      )
    },
    {"runner/task_test.py": 'def padded():\n  """What is padded."""\n'},
  ],
)
def test_allows(changes, tmp_path):
  assert not planted.found_by(prose_rules.check, tmp_path, changes)


def test_an_exception_may_only_go():
  """A listed name is allowed; a new one and a used-up entry are reported."""
  found = [
    violation.Violation("a.py", 1, "f", "no verb.", f"name a.py {name}")
    for name in ("padded", "cut_by")
  ]
  listed = violation.Exceptions({"name a.py padded": "", "name a.py gone": ""})
  new, unused = violation.apply_exceptions(found, listed)
  assert new.exception == "name a.py cut_by"
  assert "`name a.py gone` allows nothing" in str(unused)


@pytest.mark.parametrize(
  "name",
  [
    *("padded", "_of", "of_mesh", "for_hardware", "by_norm", "why_none"),
    *("settings_of", "taken", "kept", "__made"),
  ],
)
def test_names_without_a_verb(name):
  assert prose_rules.is_no_verb(name)


@pytest.mark.parametrize(
  "name",
  [
    *("pad", "feed", "_embed", "seed", "cut", "is_one_of", "has_any_of", "bed"),
    *("get_settings", "mapped_tokens", "find_of_rank", "__init__"),
  ],
)
def test_names_with_a_verb(name):
  assert not prose_rules.is_no_verb(name)


@pytest.mark.parametrize(
  ("docstring", "is_headless"),
  [
    ("What a fusion needs.", True),
    ("Returns those that differ.", True),
    ("Yields what is left.", True),
    ("A thing.\n\nReturns:\n  What it did.", True),
    ("A thing.\n\nArgs:\n  x: None for none.", True),
    ("Names of a run, or None for\nnone.", True),
    ("Returns the tokens that a step needs.", False),
    ("Those tokens are dropped.\n", True),
    ("Returns that it ends.", False),
    ("Whatever it is.", False),
  ],
)
def test_headless_relatives(docstring, is_headless):
  assert prose_rules.is_headless(docstring) == is_headless
