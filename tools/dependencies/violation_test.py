"""Listed violations are allowed, exactly or by the whole file."""

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
  for entry in ("word a.py row", "word  a.py *  # why"):
    listed = _listed(tmp_path, f"# Head\n{entry}\n")
    assert violation.apply_exceptions(found, listed) == [_OTHER, _PLAIN]
  other = _listed(tmp_path, "word a.py figure\nfragment b.py\n")
  assert violation.apply_exceptions(found, other) == [_WORD, _PLAIN]


def test_a_missing_list_allows_nothing(tmp_path):
  assert violation.apply_exceptions(
    [_OTHER], violation.load_exceptions(tmp_path)
  ) == [_OTHER]


def test_update_lists_what_is_there_and_keeps_reasons(tmp_path):
  _listed(tmp_path, "fragment b.py # Two tests need it.\nword z.py *\n")
  violation.update_exceptions(tmp_path, [_WORD, _OTHER, _PLAIN])
  text = (tmp_path / violation.PATH).read_text()
  lines = [line for line in text.splitlines() if not line.startswith("#")]
  assert lines == ["fragment b.py  # Two tests need it.", "word a.py row"]
