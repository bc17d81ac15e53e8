"""Wrong rows of the table of capabilities are found."""

import dataclasses
import itertools

import pytest

from paxon.tools import capabilities
from paxon.tools.dependencies import planted, workspace

_ROW = capabilities.Row(
  id="B1",
  what="a linear map",
  parts=("layers.block", "layers.block.Block", "layers.block.Block.width"),
  test="layers/block_test.py::test_it",
)
_SOURCES = {
  "layers/block.py": "class Block:\n  width: int = 1\n\n\nLIMIT = 2\n",
  "layers/block_test.py": "from paxon.layers import block\n\n\n"
  "def test_it():\n  assert block.LIMIT\n",
  "layers/alone_test.py": "\ndef test_it():\n  pass\n",
}


@pytest.fixture(name="tree")
def _tree(tmp_path):
  planted.write(tmp_path, _SOURCES)
  return workspace.load(tmp_path)


def _table(row=_ROW, **fields):
  """A table of all rows, whose first of area B is `row`."""
  rows = [
    capabilities.Row(id=f"{area}{number}", what="?", later="other issues")
    for area, ranges in capabilities.ROWS.items()
    for number in itertools.chain(*ranges)
  ]
  rows = [row if old.id == "B1" else old for old in rows]
  fields = {"rows": tuple(rows), "ours": {}, **fields}
  return capabilities.Table(areas={"B": "Linear"}, **fields)


def test_a_table_without_fault(tree):
  assert capabilities.problems(tree, _table()) == []


@pytest.mark.parametrize(
  ("changes", "problem"),
  [
    ({"parts": ("layers.blok.Block",)}, "B1: there is no module for layers.b"),
    ({"parts": ("layers.block.Blok",)}, "layers/block.py defines no Blok, of"),
    ({"parts": ("layers.block.Block.size",)}, "defines no size, of layers.bl"),
    ({"parts": ("layers.block.LIMIT.x",)}, "defines no x, of layers.block.L"),
    ({"parts": ("layers.block_test",)}, "layers/block_test.py is in no libra"),
    ({"parts": ("flax.linen.Dense",)}, "block_test.py does not use flax.lin"),
    ({"test": "layers/block_test.py::test_no"}, "has no function test_no"),
    ({"test": "layers/no_test.py::test_it"}, "layers/no_test.py does not ex"),
    ({"test": "layers/alone_test.py::test_it"}, "alone_test.py is in no tes"),
    ({"test": ""}, "B1: must have parts and a test, or `later`, or"),
    ({"not_taken": "why"}, "B1: must have parts and a test, or `later`, or"),
    ({"id": "B99"}, "B1 must have one row, and has 0"),
    ({"id": "B2"}, "B2 must have one row, and has 2"),
    ({"id": "B99"}, "B99 is no row that is asked for"),
  ],
)
def test_wrong_rows_are_found(tree, changes, problem):
  table = _table(dataclasses.replace(_ROW, **changes))
  found = capabilities.problems(tree, table)
  assert any(problem in one for one in found), found


def test_every_public_module_of_layers_is_accounted_for(tree):
  unused = dataclasses.replace(_ROW, parts=(), test="", later="never")
  (problem,) = capabilities.problems(tree, _table(unused))
  assert "layers.block is public, but in no row and not in `ours`" in problem
  found = capabilities.problems(tree, _table(unused, ours={"layers": "all"}))
  assert found == []
  found = capabilities.problems(tree, _table(ours={"layers.block": "it"}))
  assert found == ["layers.block is in `ours`, but serves a row."]
  (problem,) = capabilities.problems(tree, _table(ours={"layers.old": "it"}))
  assert "layers.old is in `ours`, but is no public module" in problem


def test_the_page_shows_parts_tests_and_reasons():
  page = capabilities.page(_table(ours={"layers.shared": "one set"}))
  assert "## B. Linear" in page
  assert (
    "| B1 | a linear map | `layers.block`, `layers.block.Block`,"
    " `layers.block.Block.width` | [test_it](../layers/block_test.py) |  |"
  ) in page
  assert "| B2 | ? | a later issue |  | other issues |" in page
  assert "| `layers.shared` | one set |" in page
