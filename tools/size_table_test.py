"""The table of sizes counts lines by kind, and import closures."""

from paxon.tools import size_table
from paxon.tools.dependencies import planted, workspace


def test_lines_are_counted_by_kind(tmp_path):
  planted.write(tmp_path, {"learners/adamw.py": "VALUE = 1\n" * 120})
  rows = size_table.measure(workspace.load(tmp_path))
  learners = rows["learners"]
  assert learners.production == 121  # With __init__.py.
  assert (learners.modules, learners.small, learners.fragments) == (1, 0, 0)
  assert learners.test == 2
  assert learners.build > 10
  # One production module imports each of them.
  assert rows["layers"].fragments == rows["sharding"].fragments == 1


def test_closures_count_what_import_loads(tmp_path, capsys):
  changes = {"runner/experiment.py": "from paxon.layers import block\n"}
  planted.write(tmp_path, changes)
  tree = workspace.load(tmp_path)
  assert size_table.closures(tree) == {"experiment": (3, 5)}
  assert size_table.main([str(tmp_path)]) == 0
  printed = capsys.readouterr().out
  assert "experiment        3      5" in printed
  assert printed.count("total") == 1
