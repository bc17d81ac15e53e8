"""Words that are out of use are caught where a user reads them."""

import pytest

from paxon.tools.dependencies import planted, vocabulary_rules

_PLANTED = [
  pytest.param(
    {"runner/task.py": '"""A task."""\nraise ValueError(f"{1} is refused.")\n'},
    "runner/task.py:2: `refused`: write reject, raise an error.",
    id="an error message",
  ),
  pytest.param(
    {
      "runner/task.py": (
        '"""A task."""\nparser.add_argument("--a",\n  help="It goes on.")\n'
      )
    },
    "runner/task.py:3: `goes on`: write resume, continue.",
    id="a help text",
  ),
  *(
    pytest.param(
      {"runner/task.py": f'"""A task."""\n{call}("It goes on.")\n'},
      "runner/task.py:2: `goes on`: write resume, continue.",
      id=call,
    )
    for call in ("_print", "self._print", "_report", "logging.log")
  ),
  *(
    pytest.param(
      {
        "runner/task.py": (
          f'"""A task."""\ndef {name}(x):\n  """It is refused."""\n'
          '  yield f"{x} goes on."\n'
        )
      },
      "runner/task.py:4: `goes on`: write resume, continue.",
      id=f"a line of {name}",
    )
    for name in ("format_results", "summarize", "lines")
  ),
  pytest.param(
    {"runner/task.py": '"""What a run is."""\n'},
    "runner/task.py:1: `What`: write a noun phrase that names what the module"
    " holds.",
    id="the opening of a docstring",
  ),
  pytest.param(
    {"docs/page.md": "# A page\nIt is made anew.\n"},
    "docs/page.md:2: `anew`: write again.",
    id="a page",
  ),
]


@pytest.mark.parametrize(("changes", "message"), _PLANTED)
def test_catches_the_planted_violation(tmp_path, changes, message):
  assert planted.found_by(vocabulary_rules.check, tmp_path, changes) == [
    message
  ]


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"runner/task.py": '"""A task."""\n# A comment of its own.\nX = "anew"\n'},
    {"docs/design/0001.md": "It is refused.\n"},
    {"runner/task_test.py": 'raise ValueError("refused")\n'},
  ],
)
def test_allows_what_no_user_reads(tmp_path, changes):
  assert planted.found_by(vocabulary_rules.check, tmp_path, changes) == []


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ("Two products, anew.", ["products", "anew"]),
    ("The dot product of both", []),
    ("values of\nits own", ["of its own"]),
    ("In place, in `rows` of a.rows", []),
    ("It takes place", []),
    ("recommended", []),
  ],
)
def test_words_are_found_whole(text, found):
  assert [word for word, _ in vocabulary_rules.words(text)] == found
