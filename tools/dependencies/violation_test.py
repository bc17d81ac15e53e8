"""Listed violations are allowed, and unused entries are violations."""

from paxon.tools.dependencies import violation

_WORD = violation.Violation("a.py", 1, "a.py", "no", "word a.py row")
_OTHER = violation.Violation("b.py", 1, "b.py", "no", "fragment b.py")
_PLAIN = violation.Violation("c.py", 1, "c.py", "no")


def _listed(tmp_path, text):
  (tmp_path / "tools").mkdir(exist_ok=True)
  (tmp_path / violation.PATH).write_text(text)
  return violation.load_exceptions(tmp_path)


def test_listed_violations_are_allowed(tmp_path):
  found = [_WORD, _OTHER, _PLAIN]
  listed = _listed(tmp_path, "# Head\nword  a.py row  # why\n")
  assert violation.apply_exceptions(found, listed) == [_OTHER, _PLAIN]


def test_an_unused_entry_is_a_violation(tmp_path):
  listed = _listed(tmp_path, "word a.py *\nword a.py row\nfragment b.py\n")
  assert list(map(str, violation.apply_exceptions([_WORD], listed))) == [
    "tools/exceptions.txt: `fragment b.py` allows nothing; remove it, or run"
    " check_deps --update.",
    "tools/exceptions.txt: `word a.py *` allows nothing; remove it, or run"
    " check_deps --update.",
  ]


def test_a_missing_list_allows_nothing(tmp_path):
  assert violation.apply_exceptions(
    [_OTHER], violation.load_exceptions(tmp_path)
  ) == [_OTHER]


def test_update_keeps_reasons_and_returns_what_it_adds(tmp_path):
  _listed(tmp_path, "fragment b.py # Two tests need it.\nword z.py row\n")
  added = violation.update_exceptions(tmp_path, [_WORD, _OTHER, _PLAIN])
  assert added == ["word a.py row"]
  text = (tmp_path / violation.PATH).read_text()
  lines = [line for line in text.splitlines() if not line.startswith("#")]
  assert lines == ["fragment b.py  # Two tests need it.", "word a.py row"]
