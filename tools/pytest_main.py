"""Runs the test files of one Bazel target with pytest.

Usage, from the macro in py.bzl: `pytest_main.py a_test.py [b_test.py ...]
[pytest arguments]`. It honours Bazel's test protocol: filter, shards, JUnit
report, scratch folder. No test at all is a failure, because a target that
tests nothing says nothing.
"""

import ast
from collections.abc import Callable, Sequence
import dataclasses
import functools
import gc
from importlib import metadata
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import multiprocessing
import os
import pathlib
import shlex
import sys
import types
import typing
from typing import Any, NoReturn

import beartype
import jaxtyping
import pytest

# The macro's `keep_compilations`, by this environment variable.
KEEP_COMPILATIONS = "PAXON_KEEP_COMPILATIONS"
# That the macro's `machine_code` is False.
NO_MACHINE_CODE = "PAXON_NO_MACHINE_CODE"

# Stands for CUDA's assembler: what it makes is empty, and nothing reads it.
_ASSEMBLER = """\
#!/bin/sh
[ "$1" = --version ] && exec {assembler} --version
while [ "$1" != -o ]; do shift; done
: > "$2"
"""
# What XLA looks for in CUDA's toolkit.
_TOOLKIT = ("bin/ptxas", "bin/nvlink", "nvvm/libdevice")

_HYPOTHESIS = "_hypothesis_pytestplugin"


class _Shard:
  """Keeps every n-th test, as Bazel's sharding protocol asks."""

  def __init__(self, index: int, total: int):
    self._index = index
    self._total = total
    self.collected = 0

  @pytest.hookimpl(trylast=True)
  def pytest_collection_modifyitems(
    self, config: pytest.Config, items: list[pytest.Item]
  ) -> None:
    self.collected = len(items)
    dropped = [
      item for n, item in enumerate(items) if n % self._total != self._index
    ]
    items[:] = items[self._index :: self._total]
    if dropped:
      config.hook.pytest_deselected(items=dropped)


# The names in a module of Paxon's under which it finds `checked`, and `inner`.
_CHECKED = "__checked__"
_INNER = "__checked_inner__"

# What is of a wrong type is a TypeError, however it is found.
_CONFIGURATION = beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError)


# Whether functions inside of functions have shapes, by where they are written.
_have_shapes: dict[types.CodeType, bool] = {}


def _has_shapes(hint: Any) -> bool:
  """Whether a hint has an array's shape in it, or has yet to be evaluated."""
  if isinstance(hint, str | typing.ForwardRef):
    return True
  if isinstance(hint, list):  # Of a Callable's parameters.
    return any(map(_has_shapes, hint))
  if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
    return True
  return any(map(_has_shapes, typing.get_args(hint)))


def _with_checks(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `function` with its types and shapes checked at each call."""
  hints = inspect.get_annotations(function).values()
  check = beartype.beartype(conf=_CONFIGURATION)
  if (
    any(map(_has_shapes, hints))
    # Where beartype alone checks less: what is made step by step, and the
    # `__init__` of Flax, whose own parameters are `*args, **kwargs`.
    or inspect.isgeneratorfunction(function)
    or hasattr(function, "__wrapped__")
  ):
    return jaxtyping.jaxtyped(function, typechecker=check)
  # No shape to remember from one argument to the next: a tenth of the time.
  return check(function)


def checked(made: Any) -> Any:
  """Checks the types of a function, or of a dataclass's fields.

  The code that does it is made at the first call. A test calls few of the
  functions that it imports, and making it for all takes a second.

  Args:
    made: A function or a class, less its own decorators or with them.

  Returns:
    The function, wrapped, or the class.
  """
  if inspect.isclass(made):
    if dataclasses.is_dataclass(made) and not hasattr(made.__init__, _CHECKED):
      made.__init__ = checked(made.__init__)
    return made
  with_checks = None

  @functools.wraps(made)
  def call(*args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    nonlocal with_checks
    if with_checks is None:
      with_checks = _with_checks(made)
    return with_checks(*args, **kwargs)

  setattr(call, _CHECKED, True)
  return call


def inner(made: Any) -> Any:
  """As `checked`, for what is made inside of a function.

  It is made anew at each call of that function, and its checks with it, which
  takes longer than most calls. So only shapes are worth it.

  Args:
    made: A function or a class, less its own decorators or with them.

  Returns:
    The function, wrapped where it has shapes, or the class.
  """
  if not inspect.isclass(made):
    code = made.__code__
    if code not in _have_shapes:
      hints = inspect.get_annotations(made).values()
      _have_shapes[code] = any(map(_has_shapes, hints))
    if not _have_shapes[code]:
      return made
  return checked(made)


# Where statements hold others. No expression holds a function with a name, and
# most of a tree is expressions.
_WITH_STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")


def decorated(source: str | bytes, path: str) -> ast.Module:
  """Returns the source of a module with all of its functions to be checked.

  Args:
    source: The text of the module.
    path: Its file.
  """
  tree = ast.parse(source, path)
  waiting: list[tuple[ast.AST, str]] = [(tree, _CHECKED)]
  while waiting:
    node, found = waiting.pop()
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    below = _INNER if is_function else found
    for part in _WITH_STATEMENTS:
      waiting += [(child, below) for child in getattr(node, part, ())]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      name = ast.copy_location(ast.Name(found, ast.Load()), node)
      # Functions before any other decorator, which may lose the hints; classes
      # after them, when dataclasses have their `__init__`.
      is_class = isinstance(node, ast.ClassDef)
      decorators = node.decorator_list
      decorators.insert(0 if is_class else len(decorators), name)
  return tree


class _CheckedLoader(importlib.machinery.SourceFileLoader):
  """Loads a module with `checked` on each of its functions and classes.

  jaxtyping's own hook does the same, and takes as long as the tests. It also
  hides the bytecode of all that is imported meanwhile, such as Orbax.
  """

  def get_code(self, fullname: str) -> types.CodeType:
    # Bytecode without checks may lie there.
    return self.source_to_code(self.get_data(self.path), self.path)

  def source_to_code(
    self, data: Any, path: Any, *, _optimize: int = -1
  ) -> types.CodeType:
    tree = decorated(data, path)
    return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

  def exec_module(self, module: types.ModuleType) -> None:
    setattr(module, _CHECKED, checked)
    setattr(module, _INNER, inner)
    super().exec_module(module)


class _CheckedFinder(importlib.abc.MetaPathFinder):
  """Finds the modules of Paxon, less the tests: pytest loads those."""

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: Any = None
  ) -> importlib.machinery.ModuleSpec | None:
    if fullname.partition(".")[0] != "paxon" or fullname.endswith("_test"):
      return None
    specification = importlib.machinery.PathFinder.find_spec(
      fullname, path, target
    )
    if specification is not None and isinstance(
      specification.loader, importlib.machinery.SourceFileLoader
    ):
      loader = specification.loader
      specification.loader = _CheckedLoader(loader.name, loader.path)
    return specification


class _Checks:
  """Checks types and shapes at run time in all of Paxon."""

  def pytest_load_initial_conftests(self) -> None:
    # Before pytest's own finder, which is there already.
    sys.meta_path.insert(0, _CheckedFinder())


class _Imported:
  """Spares the collector of garbage what is imported: it lives to the end.

  It would look through all of JAX several times while that is imported, and
  again in each of its longer passes.
  """

  def pytest_load_initial_conftests(self) -> None:
    gc.disable()

  def pytest_collection_finish(self) -> None:
    gc.freeze()
    gc.enable()


def _arguments(argv: Sequence[str]) -> list[str]:
  root = pathlib.Path.cwd()
  arguments = [
    f"--rootdir={root}",
    # No configuration file: what applies to a test stands in its target.
    "--config-file=/dev/null",
    "--import-mode=importlib",
    "--strict-markers",
    *("-p", "no:cacheprovider"),
    *("-W", "error"),
    *("-o", "console_output_style=classic"),
  ]
  if importlib.util.find_spec(_HYPOTHESIS):
    # Its profile for CI: the same examples in each run, and no limit on the
    # time that one takes, which a busy machine would exceed.
    arguments += ["-p", _HYPOTHESIS, "--hypothesis-profile=ci"]
  if report := os.environ.get("XML_OUTPUT_FILE"):
    arguments.append(f"--junitxml={report}")
  if scratch := os.environ.get("TEST_TMPDIR"):
    arguments.append(f"--basetemp={scratch}/pytest")
  if wanted := os.environ.get("TESTBRIDGE_TEST_ONLY"):
    arguments += ["-k", wanted]
  for argument in argv:
    # Bazel names a file of another repository by where it stands below the
    # workspace; in the runfiles it is a sibling of the workspace.
    if argument.startswith("external/"):
      argument = "../" + argument.removeprefix("external/")
    arguments.append(argument)
  return arguments


def _drop_workspace_folder() -> None:
  """Takes the workspace's folder, which Bazel puts there, off `sys.path`.

  With it `import layers` would be a second copy of `paxon.layers`.
  """
  # Found, not imported: the checks have to come first.
  specification = importlib.util.find_spec("paxon")
  assert specification is not None
  assert specification.origin is not None
  root = os.path.dirname(specification.origin)
  sys.path[:] = [entry for entry in sys.path if entry != root]
  os.environ["PYTHONPATH"] = os.pathsep.join(
    entry
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if entry != root
  )


def _has_compiler_for_gpus() -> bool:
  try:
    return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
  except ModuleNotFoundError:
    return False


def _find_in_toolkit(name: str) -> pathlib.Path:
  """Returns the path of a file of CUDA's toolkit, from whichever wheel."""
  specification = importlib.util.find_spec("nvidia")
  assert specification is not None
  folders = specification.submodule_search_locations or ()
  paths = [pathlib.Path(folder, "cu13", name) for folder in folders]
  found = next((path for path in paths if path.exists()), None)
  assert found is not None, f"no {name} in {paths}"
  return found


def _without_assembler(folder: pathlib.Path) -> None:
  """Makes a toolkit whose assembler makes nothing.

  Of what it costs to compile a program for GPUs, a third is the assembler,
  started for each kernel.

  Args:
    folder: Gets the toolkit.
  """
  for name in _TOOLKIT:
    path, found = folder / name, _find_in_toolkit(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name == "ptxas":
      path.write_text(_ASSEMBLER.format(assembler=shlex.quote(str(found))))
      path.chmod(0o700)
    else:
      path.symlink_to(found)


def main(argv: Sequence[str]) -> int:
  """Runs pytest and returns the exit status."""
  _drop_workspace_folder()
  if scratch := os.environ.get("TEST_TMPDIR"):
    os.environ.setdefault("HOME", scratch)
    os.environ["TMPDIR"] = scratch
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", scratch)
    if os.environ.get(KEEP_COMPILATIONS):
      # For targets whose processes compile the same programs. Of this target
      # alone: what one test compiled is no input of another.
      os.environ.update(
        JAX_COMPILATION_CACHE_DIR=os.path.join(scratch, "compilations"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
      )
    if _has_compiler_for_gpus():
      # Programs that a target compiles share most kernels. Nothing that a plan
      # says depends on where they come from.
      os.environ["XLA_FLAGS"] = " ".join(
        (
          os.environ.get("XLA_FLAGS", ""),
          f"--xla_gpu_kernel_cache_file={os.path.join(scratch, 'kernels')}",
          # That file needs it, where jaxlib has such a flag.
          "--xla_gpu_enable_llvm_module_compilation_parallelism=true"
          if metadata.version("jaxlib").startswith("0.10.")
          else "",
          # Other tests have the other cores.
          "--xla_gpu_force_compilation_parallelism=1",
        )
      )
      if os.environ.get(NO_MACHINE_CODE):
        toolkit = pathlib.Path(scratch, "cuda")
        _without_assembler(toolkit)
        os.environ["CUDA_ROOT"] = str(toolkit)
  shard = _Shard(
    int(os.environ.get("TEST_SHARD_INDEX", "0")),
    int(os.environ.get("TEST_TOTAL_SHARDS", "1")),
  )
  if status_file := os.environ.get("TEST_SHARD_STATUS_FILE"):
    pathlib.Path(status_file).touch()
  # pytest would rewrite, in every process, all modules of each distribution
  # that has a plugin. The one that we want is named instead.
  os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
  status = pytest.main(
    _arguments(argv), plugins=[shard, _Checks(), _Imported()]
  )
  if status == pytest.ExitCode.NO_TESTS_COLLECTED:
    if shard.collected:
      return 0  # More shards than tests: the others have them.
    print("No test was found, which counts as a failure.", file=sys.stderr)
  return int(status)


def _end(status: int) -> NoReturn:
  """Ends the process, with what it started, but without Python's own end.

  JAX and Python take two thirds of a second to free what the kernel frees
  anyway. What tests have to say of their own ends they say before.
  """
  for child in multiprocessing.active_children():
    child.terminate()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


if __name__ == "__main__":
  _end(main(sys.argv[1:]))
