"""Lazy construction of Lingvo's input generators.

Lingvo is not in Paxon's lock files, because its compiled operations need a
newer C library than some supported systems have. Install it separately.
"""

import contextlib
import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LingvoGenerator:
  """Creates the generator of Lingvo's params.

  Attributes:
    params: Lingvo's params of an input generator.
    do_eval: Whether to create the generator in Lingvo's evaluation mode.
  """

  params: Any
  do_eval: bool = False

  @property
  def file_random_seed(self) -> int:
    """The seed of the params; with 0 the order differs on each start."""
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
