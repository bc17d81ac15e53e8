"""Lingvo's input generators, imported when one is first opened.

Lingvo is in no lock of ours: its compiled operations need a newer C library
than some of the systems have that Paxon runs on. Install it beside Paxon.
"""

import contextlib
import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LingvoGenerator:
  """Opens the generator of Lingvo's parameters.

  Attributes:
    params: What Lingvo calls the params of an input generator.
    do_eval: Whether Lingvo is told that this is for evaluation.
  """

  params: Any
  do_eval: bool = False

  @property
  def file_random_seed(self) -> int:
    """The seed of the params; 0 is another order at each start."""
    return int(getattr(self.params, "file_random_seed", 0) or 0)

  def __call__(self) -> Any:
    """Returns a new generator.

    Raises:
      ModuleNotFoundError: Lingvo is not installed.
      ImportError: Its operations do not load on this system.
    """
    with contextlib.ExitStack() as stack:
      if self.do_eval:
        name = "lingvo.core.cluster_factory"
        stack.enter_context(importlib.import_module(name).SetEval(True))
      return self.params.Instantiate()
