"""`tools/site`: the HTML site of the documentation.

The Markdown of the checkout is copied to a folder, in the order of
docs/index.md, with the API of each package below its README, and Sphinx builds
it with warnings as errors. The API comes from the sources, which are parsed and
not imported. Links to files that are no pages become plain text. Notebooks can
be downloaded.
"""

import argparse
import ast
from collections.abc import Iterator, Mapping, Sequence
import importlib
import os
import pathlib
import posixpath
import re
import shutil
import sys
import tempfile

from paxon.tools import notebook_cells

INDEX = "docs/index.md"
_NOTEBOOKS = "docs/notebooks/"
_CONFIG = """\
project = "Paxon"
author = "The Paxon authors"
html_title = "Paxon"
html_theme = "furo"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
extensions = ["myst_parser"]
exclude_patterns = ["_static"]
myst_heading_anchors = 4
# Annotations such as `Rule` may name a class of several modules.
suppress_warnings = ["misc.highlighting_failure", "ref.python"]
add_module_names = False
toc_object_entries = False
python_maximum_signature_line_length = 72
"""
# Furo's smallest texts are below 11 pixels on a phone.
_STYLE = """\
body { --font-size--small: 0.875rem; --font-size--small--2: 0.8125rem;
  --font-size--small--3: 0.75rem; --font-size--small--4: 0.75rem; }
.sidebar-tree .caption, .toc-title { font-size: 0.8125rem; }
article { overflow-wrap: anywhere; }
/* Words of a table stay whole: a wide one scrolls. */
article table { overflow-wrap: break-word; }
article td code { overflow-wrap: anywhere; }
article td:has(code) { min-width: 8rem; }
sup, sub { font-size: 0.75rem; }
/* Names of packages fit a phone. */
@media (max-width: 30rem) { article h1 { font-size: 1.75rem; } }
"""
_LINK = re.compile(
  r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)|!\[([^\]]*)\]\(([^)\s]+)\)"
)
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r"^- \[([^\]]+)\]\(([^)]+)\)$")
_SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")


def find_pages(root: pathlib.Path) -> dict[str, str]:
  """Returns the path in the site of each Markdown file of a checkout."""
  pages = {INDEX: "index.md"}
  names = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
  names += [
    path.parent / "README.md"
    for path in root.glob("**/BUILD")
    if (path.parent / "README.md").exists()
  ]
  for path in sorted(set(names)):
    name = path.relative_to(root).as_posix()
    pages.setdefault(name, name.removeprefix("docs/"))
  return pages


def read_index(root: pathlib.Path) -> dict[str, list[str]]:
  """Returns the Markdown files by section of the index, in order.

  Raises:
    ValueError: A page is missing in the index, twice in it, or does not exist.
  """
  sections: dict[str, list[str]] = {}
  for line in (root / INDEX).read_text().splitlines():
    if line.startswith("## "):
      sections[line[3:]] = []
    elif match := _ITEM.match(line):
      path = posixpath.normpath(posixpath.join("docs", match[2]))
      if (root / path).is_dir():
        files = sorted((root / path).glob("*.md"))
        more = [file.relative_to(root).as_posix() for file in files]
      else:
        more = [path]
      sections[list(sections)[-1]] += more
  listed = [path for paths in sections.values() for path in paths]
  required = {
    path
    for path in find_pages(root)
    if path != INDEX and ("/" not in path or path.startswith("docs/"))
  }
  twice = {path for path in listed if listed.count(path) > 1}
  for problem, paths in (
    ("lacks", required - set(listed)),
    ("lists twice", twice),
    ("lists what does not exist:", set(listed) - required),
  ):
    if paths:
      raise ValueError(f"{INDEX} {problem} {', '.join(sorted(paths))}.")
  return sections


def write_sources(root: pathlib.Path, out: pathlib.Path) -> None:
  """Writes the sources of the site."""
  pages = find_pages(root)
  for source, page in pages.items():
    text = _rewrite_links((root / source).read_text(), source, pages, root, out)
    if source == INDEX:
      text += _contents(read_index(root), pages)
    elif "/" in source and not source.startswith("docs/"):
      package = posixpath.dirname(source)
      text = _title(text, f"paxon.{package.replace('/', '.')}")
      text += "".join(_api(root / package, package))
    path = out / page
    path.parent.mkdir(parents=True, exist_ok=True)
    if source.startswith(_NOTEBOOKS):
      file = path.with_suffix(".ipynb")
      file.write_text(notebook_cells.to_ipynb((root / source).read_text()))
      link = f"[Download this page as a notebook]({file.name})."
      text = re.sub(r"\A(# .*\n)", rf"\1\n{link}\n", text)
    path.write_text(text)
  (out / "conf.py").write_text(_CONFIG)
  static = out / "_static"
  static.mkdir(exist_ok=True)
  (static / "site.css").write_text(_STYLE)


def _contents(
  sections: Mapping[str, Sequence[str]], pages: Mapping[str, str]
) -> str:
  """Returns the tables of contents of the side bar."""
  packages = [
    path
    for path in pages
    if path.endswith("/README.md") and not path.startswith("docs/")
  ]
  parts = []
  for title, paths in sections.items():
    more = packages if title == "Reference" else []
    lines = "\n".join(pages[path] for path in [*paths, *more])
    parts.append(
      f"\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n:caption: {title}\n\n{lines}"
      "\n```\n"
    )
  return "".join(parts)


def _title(text: str, title: str) -> str:
  """Replaces the first heading of a page."""
  return re.sub(r"\A# .*$", f"# {title}", text, count=1, flags=re.MULTILINE)


def _rewrite_links(
  text: str,
  source: str,
  pages: Mapping[str, str],
  root: pathlib.Path,
  out: pathlib.Path,
) -> str:
  here = posixpath.dirname(pages[source])

  def replace(match: re.Match[str]) -> str:
    words, target = match[1] or match[3], match[2] or match[4]
    path, hash_, anchor = target.partition("#")
    if not path or ":" in path:
      return match[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if f"{path}/README.md" in pages:
      path = f"{path}/README.md"
    if match[4]:
      picture = out / "_static" / pathlib.Path(path).name
      picture.parent.mkdir(exist_ok=True)
      shutil.copy(root / path, picture)
      return f"![{words}](/_static/{picture.name})"
    if path not in pages:
      return words
    found = posixpath.relpath(pages[path], here or ".")
    return f"[{words}]({found}{hash_}{anchor})"

  return _LINK.sub(replace, text)


def _api(folder: pathlib.Path, package: str) -> Iterator[str]:
  """Yields the API of the modules of a package as Markdown."""
  found = False
  for path in sorted(folder.glob("*.py")):
    name = path.stem
    if name.startswith("_") or name.endswith(("_test", "testing")):
      continue
    tree = ast.parse(path.read_text())
    if not found:
      yield "\n## API\n"
    found = True
    dotted = f"paxon.{package.replace('/', '.')}.{name}"
    yield f"\n### `{dotted}`\n\n`````{{py:module}} {dotted}\n`````\n\n"
    yield _prose(ast.get_docstring(tree) or "")
    yield from _members(tree.body, "")


def _members(body: Sequence[ast.stmt], owner: str) -> Iterator[str]:
  """Yields public functions and classes, or the methods of a class."""
  seen = set()
  fence = "`" * (5 if owner else 7)
  for node in body:
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
      continue
    text = ast.get_docstring(node)
    if node.name.startswith("_") or node.name in seen or not text:
      continue
    seen.add(node.name)
    if isinstance(node, ast.ClassDef):
      if owner:
        continue
      bases = ", ".join(ast.unparse(base) for base in node.bases)
      head = f"{{py:class}} {node.name}" + (f"({bases})" if bases else "")
      inner = "".join(_members(node.body, node.name))
    else:
      kind = "method" if owner else "function"
      head = f"{{py:{kind}}} {node.name}({_arguments(node, bool(owner))})"
      if node.returns is not None:
        head += f" -> {ast.unparse(node.returns)}"
      inner = ""
    yield f"\n{fence}{head}\n\n{_prose(text)}{inner}{fence}\n"


def _arguments(node: ast.FunctionDef, is_method: bool) -> str:
  names = node.args
  if is_method and names.args and names.args[0].arg in ("self", "cls"):
    names.args = names.args[1:]
  return ast.unparse(names)


def _prose(text: str) -> str:
  """Returns a docstring as Markdown: sections, items and indented blocks."""
  lines: list[str] = []
  section = code = False
  for line in text.splitlines():
    indent = len(line) - len(line.lstrip())
    if code and line and not indent:
      lines += ["```", ""]
      code = False
    if line.endswith(":") and line[:-1] in _SECTIONS:
      lines += ["", f"**{line}**", ""]
      section = True
    elif section and indent == 2 and re.match(r"  \*{0,2}[\w. ]+: ", line):
      name, _, rest = line.strip().partition(": ")
      lines.append(f"- `{name}`: {rest}")
    elif section and indent:
      lines.append("  " + line.strip() if indent > 2 else line.strip())
    elif indent and not code and not (lines and lines[-1]):
      lines += ["```text", line]
      code = True
    elif code:
      lines.append(line)
    else:
      section = section and not line
      lines.append(line)
  return "\n".join([*lines, *(["```"] if code else []), "", ""])


def main(arguments: Sequence[str] | None = None) -> int:
  """Builds the site; returns Sphinx's exit status."""
  parser = argparse.ArgumentParser(prog="tools/site", description=__doc__)
  parser.add_argument("out", help="Folder of the HTML files.")
  flags = parser.parse_args(arguments)
  start = os.environ.get("BUILD_WORKING_DIRECTORY", os.getcwd())
  out = pathlib.Path(start, flags.out).absolute()
  # `bazel run` names the checkout.
  checkout = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
  root = pathlib.Path(
    checkout or pathlib.Path(__file__).resolve().parent.parent
  )
  # Not imported above: the order of the pages is checked without Sphinx.
  build = importlib.import_module("sphinx.cmd.build")
  with tempfile.TemporaryDirectory() as folder:
    write_sources(root, pathlib.Path(folder))
    options = ["-W", "--keep-going", "--quiet", "-j", "auto"]
    status = build.main([*options, f"-d{folder}/_doctrees", folder, str(out)])
  if not status:
    print(f"site: {out / 'index.html'}")
  return status


if __name__ == "__main__":
  sys.exit(main())
