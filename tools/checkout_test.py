"""The checkout itself follows the build rules.

It reads files that no target declares, as any file may violate a rule. So its
target is tagged `external`, which makes Bazel run it every time without using
the cache, and `local`, because only this machine has the checkout. The real
path of this file, a link in the runfiles, leads to it.
"""

import ast
import functools
import pathlib
import re
import runpy

import pytest

from paxon.tools import check_deps, dependency_budget
from paxon.tools.dependencies import order_rules, workspace

_ROOT = workspace.find_root(pathlib.Path(__file__))


@functools.cache
def _load():
  return workspace.load(_ROOT)


def test_no_rule_is_violated():
  found = check_deps.violations(_ROOT)
  if found:
    pytest.fail("\n".join(str(item) for item in found), pytrace=False)


def test_public_targets_are_within_their_budget():
  found = dependency_budget.check(_ROOT)
  if found:
    message = "\n".join([*found, dependency_budget.UPDATE])
    pytest.fail(message, pytrace=False)


def _read_picture(heading):
  """Returns the lines of the text block below a heading of the page."""
  page = (_ROOT / "docs/architecture.md").read_text()
  section = page.split(f"\n## {heading}\n")[1]
  return section.split("```text\n")[1].split("\n```")[0].splitlines()


def test_the_architecture_page_has_the_order_of_the_packages():
  shown = [line.split() for line in _read_picture("Packages")]
  packages = {first: tuple(rest) for first, *rest in shown}
  expected = {k: v for k, v in order_rules.MAY_USE.items() if k in packages}
  assert packages == expected
  assert set(order_rules.MAY_USE) - set(packages) == {"third_party"}


def test_the_architecture_page_shows_real_imports():
  tree = _load()
  parents: list[str] = []
  lines = _read_picture("A training run")
  for line in lines:
    depth = (len(line) - len(line.lstrip())) // 2
    path = line.split()[0]
    dotted = "paxon." + path.removesuffix(".py").replace("/", ".")
    assert path in tree.imports, path
    if depth:
      imports = {item.dotted for item in tree.imports[parents[depth - 1]]}
      assert dotted in imports, f"{parents[depth - 1]} does not import {path}"
    parents = [*parents[:depth], path]
  assert len(lines) > 15


def test_the_site_has_every_page_once(tmp_path):
  site = runpy.run_path(f"{_ROOT}/tools/site_main.py")
  sections = site["read_index"](_ROOT)
  assert "docs/planning.md" in sections["How to"]
  site["write_sources"](_ROOT, tmp_path)
  written = {path.name for path in tmp_path.glob("*.md")}
  assert {"index.md", "planning.md", "README.md"} <= written
  # Pages of packages have their API, and links that lead to pages.
  norms = (tmp_path / "layers/README.md").read_text()
  assert norms.startswith("# paxon.layers\n")
  assert "{py:class} " in norms
  links = re.findall(r"\]\(([^)#]+\.md)", (tmp_path / "index.md").read_text())
  assert len(links) > 15
  assert all((tmp_path / link).is_file() for link in links)


def test_the_site_has_the_notebooks_as_files(tmp_path):
  site = runpy.run_path(f"{_ROOT}/tools/site_main.py")
  site["write_sources"](_ROOT, tmp_path)
  pages = sorted((tmp_path / "notebooks").glob("*.md"))
  assert len(pages) == 5
  for page in pages:
    assert f"({page.stem}.ipynb)." in page.read_text()
    assert page.with_suffix(".ipynb").exists()


def test_a_page_that_the_site_lacks_is_an_error(tmp_path):
  site = runpy.run_path(f"{_ROOT}/tools/site_main.py")
  (tmp_path / "docs").mkdir()
  (tmp_path / "docs/index.md").write_text("## A\n- [One](one.md)\n")
  (tmp_path / "docs/one.md").write_text("# One\n")
  assert site["read_index"](tmp_path) == {"A": ["docs/one.md"]}
  (tmp_path / "docs/two.md").write_text("# Two\n")
  with pytest.raises(ValueError, match="lacks docs/two"):
    site["read_index"](tmp_path)
  (tmp_path / "docs/index.md").write_text(
    "## A\n- [One](one.md)\n- [Two](two.md)\n- [Two](two.md)\n"
  )
  with pytest.raises(ValueError, match="lists twice docs/two"):
    site["read_index"](tmp_path)


# An import path of a module of ours, and a name in it.
_NAMED = re.compile(
  r"(?<![\w./])(?:paxon\.)?"
  r"((?:layers|learners|pipeline|quantization|sharding|tasks)(?:\.[a-z_]\w*)+)"
  r"\.[a-zA-Z]\w*"
)
_IMPORT = re.compile(r"^\s*(?:from|import) |python3? -m ")


def _find_named(text):
  """Returns the sources of the modules whose names a text gives a reader."""
  lines = [line for line in text.splitlines() if not _IMPORT.search(line)]
  return {
    match[1].replace(".", "/") + ".py"
    for match in _NAMED.finditer("\n".join(lines))
  }


def _find_strings(source):
  """Returns the texts in a Python source: messages, docstrings, defaults."""
  return "\n".join(
    node.value
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
  )


def test_the_program_has_every_module_that_docs_and_messages_name():
  # Users type these names as values of flags; Bazel adds only what is declared.
  tree = _load()
  program = tree.closure(["//runner:main"], optional=False)
  sources = {
    path
    for label in program
    if label in tree.targets
    for path in tree.targets[label].source_paths()
  }
  pages = [path for path in tree.files if re.match(r"(docs/)?\w+\.md$", path)]
  named = {path: _find_named(tree.text(path)) for path in pages}
  for path in sources:
    if path.endswith(".py"):
      named[path] = _find_named(_find_strings(tree.text(path)))
  every = set().union(*named.values())
  # The expression finds what advice and pages name today.
  assert {
    "layers/attention/splash.py",
    "layers/attention/cudnn_attention.py",
    "layers/attention/ring.py",
    "layers/remat.py",
    "tasks/lm/params/llama.py",
  } <= every
  files = set(tree.files)
  missing = {
    f"{path}: names {one}"
    for path, modules in named.items()
    for one in modules & files - sources
  }
  assert not missing, "add them to the runtime_deps of //runner:lib"


def _read_pins(lock):
  text = (_ROOT / f"third_party/python/{lock}_lock.txt").read_text()
  return set(re.findall(r"^([\w.-]+(?:\[[\w,-]+\])?==\S+)", text, re.MULTILINE))


def test_the_container_installs_locks_that_agree():
  text = (_ROOT / "third_party/docker/Dockerfile").read_text()
  choices = re.findall(r'LOCKS="([^"]+)"', text)
  assert sorted(choices) == [
    "requirements requirements_stores",
    "requirements requirements_stores requirements_cuda",
    "requirements requirements_stores requirements_tpu",
  ]
  core = _read_pins("requirements")
  assert any(pin.startswith("jax==") for pin in core)
  for choice in choices:
    for lock in choice.split():
      # The later lock replaces what the first one installed.
      names = {pin.split("==")[0].split("[")[0] for pin in _read_pins(lock)}
      shared = {pin for pin in core if pin.split("==")[0] in names}
      versions = {re.sub(r"\[.*\]", "", pin) for pin in _read_pins(lock)}
      assert shared <= versions, lock
  for pattern in re.findall(r"^COPY (\w\S+)", text, re.MULTILINE):
    assert list(_ROOT.glob(pattern)), pattern
  [command] = re.findall(r'^ENTRYPOINT \["(.+)"\]', text, re.MULTILINE)
  assert f"\n{command} = " in (_ROOT / "pyproject.toml").read_text()


def test_names_in_notes_on_capabilities_exist():
  sources = (
    (_ROOT / path).read_text()
    for path in _load().files
    if path.endswith((".py", ".bzl")) and not path.endswith("_test.py")
  )
  words = {word for text in sources for word in re.findall(r"\w+", text)}
  for line in (_ROOT / "docs/capabilities.md").read_text().splitlines():
    if re.match(r"\| [A-M]\d+ \|", line):
      note = line.split(" | ")[-1]
      names = re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", note)))
      assert words.issuperset(names), (set(names) - words, line)
