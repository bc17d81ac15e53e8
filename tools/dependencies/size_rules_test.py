"""Long functions, wide classes and full folders are caught."""

import pytest

from paxon.tools.dependencies import planted, size_rules

_BODY = "  x = 1\n" * 59
_FIELDS = "".join(f"  x{i}: int = 0\n" for i in range(20))
_FULL = {
  f"learners/m{i}.py": f'"""M{i}."""\n' for i in range(size_rules.MAX_MODULES)
}
_TARGETS = "".join(
  f'py_library(name = "m{i}", srcs = ["m{i}.py"])\n'
  for i in range(size_rules.MAX_MODULES)
)


def _found(tmp_path, changes):
  return planted.found_by(size_rules.check, tmp_path, changes)


@pytest.mark.parametrize(
  ("source", "message"),
  [
    (
      f"\ndef f():\n{_BODY}  return x\n",
      "learners/adamw.py:2: f: has 61 lines, the limit is 60; split it by"
      " steps.",
    ),
    (
      "class A:\n  async def f(self):\n" + "    x = 1\n" * 60,
      "learners/adamw.py:2: f: has 61 lines, the limit is 60; split it by"
      " steps.",
    ),
    (
      f"class A:\n{_FIELDS}  y: int\n",
      "learners/adamw.py:1: A: has 21 fields, the limit is 20; group fields"
      " into objects.",
    ),
  ],
)
def test_what_is_too_large(source, message, tmp_path):
  assert _found(tmp_path, {"learners/adamw.py": source}) == [message]


@pytest.mark.parametrize(
  "source",
  [
    f'def f():\n  """A docstring\n\n  of four lines.\n  """\n{_BODY}',
    f"class A:\n{_FIELDS}  y: ClassVar[int] = 0\n",
  ],
)
def test_docstrings_and_constants_of_classes_do_not_count(source, tmp_path):
  assert not _found(tmp_path, {"learners/adamw.py": source})


def test_tests_may_be_long(tmp_path):
  text = f"def test_f():\n{_BODY}{_BODY}"
  assert not _found(tmp_path, {"learners/adamw_test.py": text})


def test_a_full_folder(tmp_path):
  changes = {
    **_FULL,
    "learners/BUILD": planted.CLEAN["learners/BUILD"] + _TARGETS,
  }
  assert _found(tmp_path, changes) == [
    "learners/BUILD: the folder has 26 modules, the limit is 25; divide it by"
    " topics."
  ]
