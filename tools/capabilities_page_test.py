"""docs/capabilities.md has every row of Pax; `check_deps` follows its links."""

import collections
import pathlib
import re

_ROOT = pathlib.Path(__file__).parents[1]
_PAGE = _ROOT / "docs" / "capabilities.md"
# Rows of each area of Pax.
_ROWS = {
  **{"A": 73, "B": 33, "C": 18, "D": 39, "E": 43, "F": 13, "G": 30},
  **{"H": 37, "I": 34, "J": 39, "K": 67, "L": 20, "M": 33},
}
_COLUMNS = ("row", "capability", "status", "where", "note")


def _rows() -> list[dict[str, str]]:
  found = []
  for line in _PAGE.read_text().splitlines():
    cells = [cell.strip() for cell in line.strip("|").split(" | ")]
    if re.match(r"\| [A-M]\d+ \|", line):
      found.append(dict(zip(_COLUMNS, cells, strict=True)))
  return found


def test_all_rows_of_pax_are_there_once_and_in_order():
  expected = [f"{a}{i + 1}" for a, count in _ROWS.items() for i in range(count)]
  assert [row["row"] for row in _rows()] == expected
  assert len(expected) == 479


def test_what_is_here_is_somewhere():
  for row in _rows():
    assert row["status"] in ("here", "partly", "not"), row
    assert row["capability"], row
    assert ("](../" in row["where"]) == (row["status"] != "not"), row
    # What is missing of a part.
    assert row["status"] != "partly" or row["note"], row


def test_the_table_of_areas_counts_the_rows():
  counts = collections.Counter((r["row"][0], r["status"]) for r in _rows())
  for area, total in _ROWS.items():
    line = re.search(rf"^\| {area}\. .*$", _PAGE.read_text(), re.MULTILINE)
    assert line is not None
    numbers = [int(cell) for cell in re.findall(r"\| (\d+)\b", line[0])]
    by_status = [counts[area, s] for s in ("here", "partly", "not")]
    assert numbers == [total, *by_status]
