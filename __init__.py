"""Paxon configures, checks and trains large models in JAX.

`paxon.plan(function, *arguments, target="h200:1x8")` plans any JAX function for
hardware you don't have, and `paxon.assert_plan` tests its plan. Both are
loaded on first use, so that `import paxon` loads nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from paxon.runner.plan.functions.public import assert_plan as assert_plan
  from paxon.runner.plan.functions.public import plan as plan

__version__ = "0.1.0"

_PUBLIC = ("assert_plan", "plan")


def __getattr__(name: str) -> Any:
  if name not in _PUBLIC:
    raise AttributeError(f"module 'paxon' has no attribute {name!r}")
  public = importlib.import_module("paxon.runner.plan.functions.public")
  return getattr(public, name)


def __dir__() -> list[str]:
  return sorted([*globals(), *_PUBLIC])
