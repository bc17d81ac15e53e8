"""Docstrings in whole sentences, functions that begin with verbs, stray words.

A docstring, or the text of one of its entries, must not begin with a headless
relative ("Returns what ...", "Those of ...", "tokens: That of ..."). A function
is named by a verb: not by a bare participle (`padded`), nor by a preposition
(`of`, `of_mesh`, `settings_of`). Properties and fixtures are values, so they
may be named like one.
"""

import ast
from collections.abc import Iterator
import re

from paxon.tools.dependencies import violation, workspace

_OPENING = re.compile(
  r"\s*(?:(?:Returns?|Yields?|Gives)\s+)?"
  r"(?:what|those|that (?:of|which)|whose)\b",
  re.IGNORECASE,
)
# `tokens:` or `Returns:` at the start of a line.
_ENTRY = re.compile(
  r"^ *(?!Args|Attributes|Raises)(?:\*{0,2}\w+(?:, \*{0,2}\w+)*|`\w+`):(?=\s)",
  re.MULTILINE,
)
_NONE_FOR_NONE = re.compile(r"\bNone\s+for\s+none\b")

_PREPOSITIONS = frozenset({"of", "for", "by", "why", "what"})
# Verbs and nouns that end like a participle.
_NO_PARTICIPLE = (
  "bleed|breed|embed|exceed|feed|heed|hidden|need|proceed|seed|shed|speed"
  "|succeed"
)
# `cut` and `split` are verbs, too.
_PARTICIPLE = re.compile(
  rf"(?!(?:{_NO_PARTICIPLE})$)(?:\w{{2,}}ed|bound|brought|built|caught|chosen"
  r"|dealt|done|drawn|driven|forgotten|found|frozen|given|gone|grown|heard|held"
  r"|kept|known|laid|left|lent|lost|made|meant|met|overwritten|paid|rewritten"
  r"|said|seen|sent|shown|spent|stolen|sunk|taken|taught|thrown|told|unbound"
  r"|woven|written)"
)
_STRAY = re.compile(r"\b(XX+|FIXME|HACK|TODO(?!\([\w.@-]+\)))\b")

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Documented = ast.Module | ast.ClassDef | _Function


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each such docstring, function name and word."""
  for path in tree.files:
    if not path.endswith(".py") or path.startswith("third_party/"):
      continue
    text = tree.text(path)
    try:
      module = ast.parse(text)
    except SyntaxError:
      continue  # Reported with the imports.
    if not path.startswith("tools/dependencies/"):
      yield from _check_stray_words(path, text)
    if not path.endswith("_test.py"):
      for node in ast.walk(module):
        if isinstance(node, _Documented):
          yield from _check_docstring(path, node)
        if isinstance(node, _Function) and not _is_value(node):
          yield from _check_name(path, node)


def is_headless(docstring: str) -> bool:
  """Whether a docstring or one of its entries begins without a noun."""
  starts = [0, *(match.end() for match in _ENTRY.finditer(docstring))]
  return bool(
    any(_OPENING.match(docstring, start) for start in starts)
    or _NONE_FOR_NONE.search(docstring)
  )


def is_no_verb(name: str) -> bool:
  """Whether a function's name is a bare participle or has a preposition."""
  words = name.strip("_").split("_")
  if words[0] in _PREPOSITIONS:
    return True
  if len(words) > 1:
    return words[-1] == "of" and words[0] not in ("is", "has")
  return _PARTICIPLE.fullmatch(words[0]) is not None


def _check_docstring(
  path: str, node: _Documented
) -> Iterator[violation.Violation]:
  docstring = ast.get_docstring(node)
  if docstring and is_headless(docstring):
    name = path if isinstance(node, ast.Module) else node.name
    line = 1 if isinstance(node, ast.Module) else node.lineno
    yield violation.Violation(
      path,
      line,
      name,
      "its docstring has a headless relative; name the thing: `Returns the"
      " kernel of each matmul.`",
      f"docstring {path} {'module' if name == path else name}",
    )


def _check_name(path: str, node: _Function) -> Iterator[violation.Violation]:
  if is_no_verb(node.name):
    yield violation.Violation(
      path,
      node.lineno,
      node.name,
      "a function's name begins with a verb, as in `pad_slots` or"
      " `get_settings`.",
      f"name {path} {node.name}",
    )


def _is_value(node: _Function) -> bool:
  names = " ".join(ast.unparse(each) for each in node.decorator_list)
  return bool(re.search(r"property\b|fixture\b", names))


def _check_stray_words(path: str, text: str) -> Iterator[violation.Violation]:
  for number, line in enumerate(text.splitlines(), 1):
    for match in _STRAY.finditer(line):
      yield violation.Violation(
        path,
        number,
        path,
        f"stray `{match[0]}`; remove it, or name an owner: `TODO(name)`.",
        f"stray {path} {match[0]}",
      )
