"""Runs the notebooks of docs/notebooks from their first cell to their last.

They run in this process at toy size, as a kernel would run them: in one
namespace, which is the module `__main__`.
"""

import ast
import os
import pathlib
import sys
import types
from typing import Any

import pytest

from paxon.tools import notebook_cells

# The path of one of them.
_FOLDER = pathlib.Path(os.environ["PAXON_NOTEBOOK"]).parent
_KNOBS = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "length": 64}
# The settings with which they are fast.
_TOY = {
  "a_layer_of_your_own": {"NUM_STEPS": 4, "KNOBS": _KNOBS},
  "import_and_chat": {"NUM_STEPS": 4},
  "plan_70b": {
    "TARGETS": ("cpu:4",),
    "SIZES": {
      "num_layers": 2,
      "embed_dim": 64,
      "mlp_dim": 128,
      "num_heads": 4,
      "num_kv_heads": 2,
      "head_dim": 16,
      "vocab_size": 512,
      "loss_chunk_length": 64,
    },
  },
  "quickstart": {"NUM_STEPS": 4, "KNOBS": _KNOBS},
  "read_a_run": {"NUM_STEPS": 4, "KNOBS": _KNOBS},
}


def test_every_notebook_runs() -> None:
  """The table has every page of the folder."""
  assert {path.stem for path in _FOLDER.glob("*.md")} == set(_TOY)


@pytest.mark.parametrize("name", _TOY)
def test_a_notebook_runs(
  name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Every cell runs after those above it."""
  page = (_FOLDER / f"{name}.md").resolve()
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PAXON_CACHE_DIR", str(tmp_path / "cache"))
  main = types.ModuleType("__main__")
  monkeypatch.setitem(sys.modules, "__main__", main)
  text = notebook_cells.change(page.read_text(), _TOY[name])
  for cell in notebook_cells.read(text):
    if cell.is_code:
      _run(cell, page, vars(main))


def _run(
  cell: notebook_cells.Cell, page: pathlib.Path, namespace: dict[str, Any]
) -> None:
  """Runs a cell; a kernel also shows the value of its last line."""
  tree = ast.parse(cell.text)
  ast.increment_lineno(tree, cell.line - 1)
  last = None
  if isinstance(final := tree.body[-1], ast.Expr):
    last = ast.Expression(final.value)
    tree.body.pop()
  exec(compile(tree, str(page), "exec"), namespace)
  if last is not None:
    shown = eval(compile(last, str(page), "eval"), namespace)
    if hasattr(shown, "_repr_svg_"):
      assert shown._repr_svg_().startswith("<svg ")
