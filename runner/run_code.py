"""Rejects Python modules that lie in a run directory or the folder of a study.

A run directory may come from someone else, and Python may search for modules
in it: if it is the working directory of `python -m`, or on PYTHONPATH. A finder
at the head of `sys.meta_path` compares real paths of where each module would be
loaded from, before its code runs. An installation inside the directory, such as
a virtual environment of this interpreter, is not a part of the run.
"""

import functools
from importlib import machinery
import os
import pathlib
import sys
import types
from typing import Any

from paxon.runner import files, user_error

FLAG = "allow_run_code"
# Files of a sweep; see `paxon.tools.sweeps.sweep_study`.
STUDY = "study.json"


class RunCodeError(user_error.UserError):
  """A module lies in a run directory."""


def reject(folder: str | os.PathLike[str]) -> None:
  """Rejects modules of a run directory for the rest of this process.

  A study is rejected with each of its trials. Has no effect for a folder of a
  store, from which Python cannot import, or for one that `allow` was given.
  """
  if not files.is_local(folder):
    return
  found = pathlib.Path(os.path.abspath(folder))
  if os.path.lexists(found.parent / STUDY):
    found = found.parent
  _get_finder().add(os.fspath(found))


def allow(folder: str | os.PathLike[str]) -> None:
  """Makes a later `reject` of this folder, or of its study, have no effect."""
  if files.is_local(folder):
    _get_finder().allowed.add(os.path.abspath(folder))


def _get_finder() -> "_Finder":
  for finder in sys.meta_path:
    if isinstance(finder, _Finder):
      return finder
  finder = _Finder()
  sys.meta_path.insert(0, finder)
  return finder


class _Finder:
  """Asks the finders after it, and rejects modules of some folders.

  Attributes:
    allowed: Folders whose modules are accepted.
    is_inherited: Processes that read examples have the same finder.
  """

  is_inherited = True

  def __init__(self) -> None:
    self.allowed = set[str]()
    self._folders: dict[str, tuple[str, ...]] = {}

  def add(self, folder: str) -> None:
    """Rejects the modules of a folder."""
    if not any(is_inside(each, folder) for each in self.allowed):
      self._folders[folder] = _find_installations(folder)

  def find_spec(
    self,
    name: str,
    # Lists, or paths of namespace packages, which are no sequences.
    path: Any = None,
    target: types.ModuleType | None = None,
  ) -> machinery.ModuleSpec | None:
    """Returns the spec of the first finder after this one.

    Raises:
      RunCodeError: The module lies in a rejected folder.
    """
    after = sys.meta_path[sys.meta_path.index(self) + 1 :]
    for finder in after:
      find = getattr(finder, "find_spec", None)
      spec = find(name, path, target) if find else None
      if spec is not None:
        self._check(name, spec)
        return spec
    return None

  def _check(self, name: str, spec: machinery.ModuleSpec) -> None:
    # Built-in modules and namespace packages hold no code of a file.
    if not spec.has_location or not spec.origin:
      return
    for folder, installations in self._folders.items():
      if is_inside(spec.origin, folder) and not any(
        is_inside(spec.origin, each) for each in installations
      ):
        raise RunCodeError(
          f"The module {name} would be imported from {spec.origin}, in the run"
          f" or study {folder}, which must not bring its own code. If you trust"
          " it, move the module elsewhere and name its folder in PYTHONPATH, or"
          f" pass --{FLAG}."
        )


def is_inside(
  path: str | os.PathLike[str], folder: str | os.PathLike[str]
) -> bool:
  """Whether a path lies in a folder, as it is written or by its real path."""
  real, *_ = roots = _resolve(folder)
  absolute = os.path.abspath(path)
  if any(_starts_with(absolute, root) for root in roots):
    return True
  real_path = os.path.join(
    _real_folder(os.path.dirname(absolute)), os.path.basename(absolute)
  )
  if os.path.islink(real_path):
    real_path = os.path.realpath(real_path)
  return _starts_with(real_path, real)


def _starts_with(path: str, root: str) -> bool:
  return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


# Imports ask for a thousand folders, most of them several times.
@functools.lru_cache(maxsize=4096)
def _real_folder(folder: str) -> str:
  return os.path.realpath(folder)


@functools.lru_cache(maxsize=64)
def _resolve(folder: str | os.PathLike[str]) -> tuple[str, str]:
  return os.path.realpath(folder), os.path.abspath(folder)


def _find_installations(folder: str) -> tuple[str, ...]:
  """Returns the folders of this interpreter and program inside of a folder."""
  package = pathlib.Path(__file__).parent.parent
  given = (sys.prefix, sys.base_prefix, sys.exec_prefix, os.fspath(package))
  return tuple(
    each
    for each in given
    if is_inside(each, folder) and not is_inside(folder, each)
  )
