"""Words that user-visible text does not use, and what to write instead.

Checked are Markdown pages, the strings that a program shows to its user
(arguments of `raise`, of `print`, of flags and of argument parsers, and strings
in functions that format lines), and the first line of each module's docstring.
Design notes keep their words.
"""

import ast
from collections.abc import Iterator, Sequence
import re

from paxon.tools.dependencies import violation, workspace

# Pattern -> replacement.
_INSTEAD = {
  r"closed forms?": "analytical estimate",
  r"go(?:es|ne|ing)? on": "resume, continue",
  r"few bits": "low-precision, quantized, 8-bit",
  r"anew": "again",
  r"mend(?:s|ed|ing)?": "fix",
  r"refus(?:e|es|ed|al|als|ing)": "reject, raise an error",
  r"(?:is|are|was|be|being) told": "receives, takes, is given",
  r"(?:is|are|was|were) not there": "does not exist, is missing",
  r"of (?:its|their|his|an) own": "separate, dedicated",
  r"held against": "compared with",
  r"(?:told|tells?) apart|tells? \w+ apart": "distinguish",
  r"unless said(?: otherwise)?|unless told(?: otherwise)?": "by default",
  r"(?<!dot )(?<!outer )(?<!inner )products?": "matmul",
  r"figures?": "metric, value, number",
  r"rows?": "sequence, example (a table or a matrix has rows)",
  r"(?<!in )(?<!take )(?<!takes )(?<!took )places?": "position, token",
  r"jumps?": "spike",
  r"says?|said": "reports, prints, states",
  r"tells?|told": "reports, prints, returns",
  r"hears?|heard": "receives",
  r"beside": "compared with, next to",
}
# Each word or phrase is a named group, so that a hit leads to its advice.
_ADVICE = tuple(_INSTEAD.values())
_WORDS = re.compile(
  r"(?<![\w/.`-])(?:"
  + "|".join(f"({pattern})" for pattern in _INSTEAD)
  + r")(?![\w/`-]|\.\w)",
  re.IGNORECASE,
)
_OPENING = re.compile(r"(What|How|Which|Whether|Who|Where)\b")

# Functions whose string arguments a user reads.
_SHOWN = re.compile(
  r"_?print|_?report|_?log|say|exit|add_argument|add_parser|ArgumentParser|\w*Error|fail"
  r"|DEFINE_\w+|info|warning|warn|error"
)
# Functions that make the lines that their callers print.
_FORMATTERS = re.compile(r"_?(format_\w+|summarize|lines)")
_NOT_SHOWN = ("docs/design/", "third_party/", "tools/dependencies/")


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each word that is out of use."""
  for path in tree.files:
    if path.startswith(_NOT_SHOWN):
      continue
    if path.endswith(".md"):
      lines = enumerate(tree.text(path).splitlines(), 1)
    elif path.endswith(".py") and not path.endswith("_test.py"):
      try:
        module = ast.parse(tree.text(path))
      except SyntaxError:
        continue  # Reported with the imports.
      lines = _shown_strings(module)
      if match := _OPENING.match(_summary(module)):
        yield _violation(
          path, 1, match[0], "a noun phrase that names what the module holds"
        )
    else:
      continue
    for line, text in lines:
      for word, instead in words(text):
        yield _violation(path, line, word, instead)


def words(text: str) -> Iterator[tuple[str, str]]:
  """Yields the words of `text` that are out of use, with replacements."""
  for match in _WORDS.finditer(" ".join(text.split())):
    yield match[0].lower(), _ADVICE[(match.lastindex or 1) - 1]


def _summary(module: ast.Module) -> str:
  """Returns the first line of a module's docstring."""
  return (ast.get_docstring(module) or "").partition("\n")[0]


def _shown_strings(module: ast.Module) -> Iterator[tuple[int, str]]:
  """Yields the strings that a user may read, each with its line."""
  yield 1, _summary(module)
  seen: set[ast.AST] = set()
  for node in ast.walk(module):
    roots: Sequence[ast.AST] = ()
    match node:
      case ast.Raise(exc=ast.expr() as raised):
        roots = [raised]
      case ast.Call(
        func=ast.Name(id=name) | ast.Attribute(attr=name),
        args=args,
        keywords=keywords,
      ):
        if _SHOWN.fullmatch(name):
          roots = [*args, *keywords]
        else:
          roots = [item for item in keywords if item.arg == "help"]
      case ast.FunctionDef(name=name, body=body) if _FORMATTERS.fullmatch(name):
        roots = body[1:] if ast.get_docstring(node) else body
    for child in (child for root in roots for child in ast.walk(root)):
      match child:
        case ast.Constant(value=str(text)) if child not in seen:
          seen.add(child)
          yield child.lineno, text


def _violation(
  path: str, line: int, word: str, instead: str
) -> violation.Violation:
  return violation.Violation(
    path,
    line,
    path,
    f"`{word}`: write {instead}.",
    f"word {path} {word.replace(' ', '_')}",
  )
