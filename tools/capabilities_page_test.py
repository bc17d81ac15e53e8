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
    # The name in Pax, and its whole text.
    assert re.match(r"\*\*.+?\*\*: .+", row["capability"]), row
    assert ("](../" in row["where"]) == (row["status"] != "not"), row
    # What is missing of a part.
    assert row["status"] != "partly" or row["note"], row


def test_the_table_of_areas_lists_the_rows():
  ids = collections.defaultdict[tuple[str, str], list[str]](list)
  for row in _rows():
    ids[row["row"][0], row["status"]].append(row["row"])
  page = _PAGE.read_text()
  for area, total in _ROWS.items():
    line = re.search(rf"^\| {area}\. [^|]*\| (.*) \|$", page, re.MULTILINE)
    assert line is not None
    missing = [
      ": ".join([str(len(found)), *([", ".join(found)] if found else [])])
      for found in (ids[area, "partly"], ids[area, "not"])
    ]
    here = str(len(ids[area, "here"]))
    assert line[1].split(" | ") == [str(total), here, *missing]
  counts = collections.Counter(row["status"] for row in _rows())
  numbers = [479, counts["here"], counts["partly"], counts["not"]]
  assert f"| All | {' | '.join(map(str, numbers))} |" in page
