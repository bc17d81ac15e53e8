"""READMEs that are missing or out of date are caught."""

import pytest

from paxon.tools.dependencies import planted, readme_rules

_PLANTED = [
  pytest.param(
    planted.edit("learners/README.md", "| `adamw` | it |\n", ""),
    "learners/README.md: does not list the public target //learners:adamw; add"
    " a row `adamw` to its Modules table, or make the target not public.",
    id="a public target that is not in it",
  ),
  pytest.param(
    planted.build("learners", "//visibility:public", "//:__subpackages__"),
    "learners/README.md: lists `adamw`, but //learners:adamw is not public;"
    " make it public, or remove the row.",
    id="a row without a public target",
  ),
  pytest.param(
    planted.edit("learners/README.md", "`adamw` |", "`adamw` |\n| `moe/` |"),
    "learners/README.md: lists the folder `moe/`, which has no BUILD; remove"
    " the row.",
    id="a row without a folder",
  ),
  pytest.param(
    {"learners/README.md": None},
    "learners/README.md: is missing; describe the package.",
    id="missing",
  ),
  pytest.param(
    planted.edit("learners/README.md", "## Decisions\n", ""),
    "learners/README.md: has the headings Modules, Use it, Rules here, Depends"
    " on; every package has Modules, Use it, Rules here, Depends on, Decisions,"
    " in this order.",
    id="headings",
  ),
  pytest.param(
    planted.edit("learners/README.md", "```python", "```text"),
    "learners/README.md: has no example; add a ```python block under Use it.",
    id="no example",
  ),
  pytest.param(
    planted.edit(
      "learners/README.md", "import adamw\n", "import adamw\n" + "1\n" * 18
    ),
    "learners/README.md: the example at line 9 has 19 lines; make it at most"
    " 18.",
    id="a long example",
  ),
  pytest.param(
    planted.build("learners", '["README.md"]', "[]"),
    "learners/README.md: has an example that no test runs; add"
    ' "README.md" to the srcs of a py_test in BUILD.',
    id="an example that is not run",
  ),
  pytest.param(
    planted.edit("README.md", "| `layers/` ", ""),
    "README.md: its map has no line for `layers/`; add one.",
    id="a folder that is not in the map",
  ),
  pytest.param(
    {
      "docs/a.md": "[1](b.md#how) [2](../runner/task.py) [3](../learners/)"
      " [4](a.md#here) [5](#here) [6](https://a.b/c.md)\n```\n[7](c.md)\n```\n"
    },
    "docs/a.md: links to b.md, which does not exist; fix the link.",
    id="a link that leads nowhere",
  ),
]


@pytest.mark.parametrize(("changes", "message"), _PLANTED)
def test_catches_the_planted_violation(tmp_path, changes, message):
  assert planted.found_by(readme_rules.check, tmp_path, changes) == [message]


def test_allows_the_clean_workspace(tmp_path):
  assert planted.found_by(readme_rules.check, tmp_path, {}) == []


def test_tools_list_modules_that_are_not_public(tmp_path):
  changes = planted.package("tools", "check_deps", "VALUE = 1\n")
  changes["tools/BUILD"] = changes["tools/BUILD"].replace(
    '  visibility = ["//visibility:public"],\n', ""
  )
  changes["README.md"] = planted.CLEAN["README.md"] + "`tools/`"
  assert planted.found_by(readme_rules.check, tmp_path, changes) == []
