"""Which error of a running program is a part's refusal of its configuration.

Parts check their own fields when they are built. What depends on other parts,
such as a width that does not divide, shows only when a model is traced, or
when an input opens its files. Such an error is the user's to mend and becomes
one line with the part's place in the configuration; a bug keeps its traceback.

It is a refusal where

* a method of a configured part was running, and
* the error was raised on purpose, by a `raise` statement outside of the
  libraries, or it can only come from a value: the operating system misses a
  file, or a number does not fit into a machine word.

So a shape error of `jnp.einsum` in a layer of one's own, or a misspelled
attribute, is a bug: there the traceback says more than a line.
"""

from collections.abc import Iterator
import opcode
import os
import types

import fiddle as fdl

from paxon.runner import user_error
from paxon.runner.configuration import tree

_RAISE = "RAISE_VARARGS"
_MAX_PATHS = 3
_OURS = __name__.partition(".")[0]
# Told by name too, because Bazel installs them elsewhere; and ours may be
# installed beside them.
_LIBRARIES = frozenset(
  (
    *("beartype", "chex", "einops", "etils", "fiddle", "flax", "jax", "jaxlib"),
    *("jaxtyping", "numpy", "opt_einsum", "optax", "orbax", "tensorstore"),
  )
)
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def of(error: BaseException, config: fdl.Buildable) -> str | None:
  """Returns a refusal as a message with its place, or None for a bug.

  Args:
    error: As caught, with its traceback.
    config: The root of the configuration that was run.
  """
  by_value = isinstance(error, OSError | OverflowError)
  if not by_value and not isinstance(error, ValueError | TypeError):
    return None
  if isinstance(error, user_error.UserError):
    return None
  frames = list(_frames(error))
  if not by_value and not _is_on_purpose(frames):
    return None
  paths = _paths(frames, config)
  if not paths:
    return None
  shown = " or ".join(paths[:_MAX_PATHS])
  more = (
    f" or {len(paths) - _MAX_PATHS} more" if len(paths) > _MAX_PATHS else ""
  )
  what = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
  if isinstance(error, OverflowError):
    what = f"A number is too large ({what})"
  return f"{what} (at {shown}{more})."


def _frames(error: BaseException) -> Iterator[types.TracebackType]:
  """Yields the traceback's entries, outermost first."""
  entry = error.__traceback__
  while entry is not None:
    yield entry
    entry = entry.tb_next


def _is_on_purpose(frames: list[types.TracebackType]) -> bool:
  """Whether the innermost frame is ours or the user's, at a `raise`."""
  if not frames:
    return False
  frame = frames[-1].tb_frame
  name = opcode.opname[frame.f_code.co_code[frames[-1].tb_lasti]]
  return name == _RAISE and not _is_library(frame)


def _is_library(frame: types.FrameType) -> bool:
  root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
  if root == _OURS:
    return False
  folders = frame.f_code.co_filename.split(os.sep)
  return root in _LIBRARIES or not _INSTALLED.isdisjoint(folders)


def _paths(
  frames: list[types.TracebackType], config: fdl.Buildable
) -> list[str]:
  """Returns where the innermost running part stands in the configuration.

  By class, because linen copies its modules; so there may be several places.
  """
  places: dict[object, list[str]] = {}
  for path, node in tree.nodes(config):
    if path:
      places.setdefault(fdl.get_callable(node), []).append(path)
  for entry in reversed(frames):
    owner = entry.tb_frame.f_locals.get("self")
    for cls in type(owner).__mro__:
      if cls in places:
        return places[cls]
  return []
