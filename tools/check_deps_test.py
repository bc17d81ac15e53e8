"""check_deps applies every rule, prints what is broken, and fails."""

import pytest

from paxon.tools import check_deps
from paxon.tools.dependencies import planted, violation, workspace


def test_a_clean_workspace_has_no_broken_rule(tmp_path, capsys):
  planted.write(tmp_path, {})
  assert check_deps.main([str(tmp_path)]) == 0
  assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    pytest.param(
      {"learners/adamw.py": "import scipy\n"}, "imports `scipy`", id="edges"
    ),
    pytest.param(
      planted.build(
        "learners",
        "deps = []",
        'deps = [], runtime_deps = ["//layers:block"]',
      ),
      "learners/ may use only sharding/",
      id="folders",
    ),
    pytest.param(
      planted.build(
        "sharding", "deps = [", 'runtime_deps = [":axes"], deps = ['
      ),
      "//sharding:axes -> //sharding:axes",
      id="cycles",
    ),
    pytest.param(
      planted.build("sharding", '  size = "small",\n', ""),
      "a test needs a size",
      id="targets",
    ),
    pytest.param({"runner/job.py": ""}, "is in no target", id="files"),
    pytest.param({"runner/README.md": None}, "is missing", id="READMEs"),
    pytest.param(
      planted.build("runner", '["task.py"]', 'glob(["*.py"])'),
      "glob hides files",
      id="unreadable BUILD",
    ),
    pytest.param(
      {"runner/task.py": "x = (\n"}, "never closed", id="unreadable source"
    ),
  ],
)
def test_every_kind_of_rule_is_applied(tmp_path, capsys, changes, message):
  planted.write(tmp_path, changes)
  assert check_deps.main([str(tmp_path)]) == 1
  printed = capsys.readouterr()
  assert message in printed.out
  assert printed.err.endswith(" violations\n")


def test_update_prints_what_it_adds(tmp_path, capsys, monkeypatch):
  changes = {
    "docs/page.md": "# A page\nIt is made anew.\n",
    violation.PATH: "word docs/page.md row\n",
  }
  planted.write(tmp_path, changes)
  assert check_deps.main([str(tmp_path)]) == 1
  assert "`word docs/page.md row` allows nothing" in capsys.readouterr().out
  monkeypatch.setattr(workspace, "find_root", lambda _: tmp_path)
  assert check_deps.main(["--update"]) == 0
  assert capsys.readouterr().out == (
    "added to tools/exceptions.txt: word docs/page.md anew\n"
  )
  assert check_deps.main([str(tmp_path)]) == 0


def test_says_where_it_looked_for_the_workspace(tmp_path):
  with pytest.raises(FileNotFoundError, match="has a WORKSPACE file"):
    check_deps.main([str(tmp_path)])
