"""Parameter counts of Pax's experiments by the formulas of their layers.

The classes of Pax are defined by Python itself, from their own files, with
stand-ins for every library that they import; so constants have the values that
Pax reads. The formulas follow the definitions of the layers in Praxis. Nothing
of the rewriting is used.
"""

import abc
from collections.abc import Sequence
import importlib.abc
import importlib.machinery
import importlib.util
import json
import pathlib
import runpy
import subprocess
import sys
import types
from typing import Any, Final

_REAL: Final = (
  "paxml",
  "paxml.contrib",
  "paxml.contrib.gpu",
  "paxml.contrib.gpu.scripts_gpu",
  "paxml.tasks",
  "paxml.tasks.lm",
  "paxml.tasks.lm.params",
)
_BUCKETS: Final = 32


class _StandInType(abc.ABCMeta):
  """A type with any attribute, which can be a base class."""

  def __getattr__(cls, name: str) -> Any:
    # A constant that a class of Pax does not define.
    is_missing = name.isupper() and cls.__mro__[0] is not _StandIn
    if name.startswith("__") or is_missing:
      raise AttributeError(name)
    return _StandIn

  def __or__(cls, other: object) -> Any:
    return cls

  def __getitem__(cls, key: object) -> Any:
    return cls


class _StandIn(metaclass=_StandInType):
  """A stand-in for any value, class or function."""

  def __init__(self, *args: object, **kwargs: object) -> None:
    pass

  def __getattr__(self, name: str) -> Any:
    return _StandIn()

  def __call__(self, *args: Any, **kwargs: object) -> Any:
    # A decorator returns what it decorates.
    return args[0] if args and isinstance(args[0], type) else self


class _Module(types.ModuleType):
  """A module with any attribute that is no file of experiments."""

  __root__: pathlib.Path

  def __getattr__(self, name: str) -> Any:
    full = f"{self.__name__}.{name}"
    if name.startswith("__") or _find_file(self.__root__, full) is not None:
      # So that Python imports it.
      raise AttributeError(name)
    return _StandIn


def _find_file(root: pathlib.Path, name: str) -> pathlib.Path | None:
  """Returns the file or folder of a module with experiments, or None."""
  file = root / (name.replace(".", "/") + ".py")
  is_real = name.rpartition(".")[0] in _REAL and file.exists()
  if is_real and {"tasks", "scripts_gpu"}.intersection(name.split(".")):
    return file
  return file.with_suffix("") if name in _REAL else None


def _is_replaced(name: str) -> bool:
  """Whether a module is Pax's, or of a library that it imports."""
  root = name.partition(".")[0]
  return root not in (*sys.stdlib_module_names, "__main__", "paxon")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds the files of experiments; all other modules are stand-ins."""

  def __init__(self, root: pathlib.Path) -> None:
    self._root = root

  def find_spec(
    self, fullname: str, path: object = None, target: object = None
  ) -> importlib.machinery.ModuleSpec | None:
    """Returns the spec of a file or of a stand-in."""
    if not _is_replaced(fullname):
      return None
    file = _find_file(self._root, fullname)
    if file is not None and file.suffix:
      return importlib.util.spec_from_file_location(fullname, file)
    return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
    """Returns a stand-in."""
    made = _Module(spec.name)
    made.__root__ = self._root
    made.__path__ = []
    return made

  def exec_module(self, module: types.ModuleType) -> None:
    """Does nothing."""


def read_classes(module: str) -> dict[str, type]:
  """Returns the classes that a module of Pax defines."""
  loaded = runpy.run_module(module, run_name=module)
  return {
    name: value
    for name, value in loaded.items()
    if isinstance(value, type) and value.__module__ == module
  }


def count_all(
  root: pathlib.Path, modules: Sequence[str]
) -> dict[str, dict[str, int | None]]:
  """Returns the parameters of classes, by module and name.

  They are counted in a process of their own, where Pax's libraries are
  stand-ins.

  Args:
    root: Folder with the package `paxml`.
    modules: Names of the modules.
  """
  done = subprocess.run(
    [sys.executable, "-m", __spec__.name, str(root), *modules],
    stdout=subprocess.PIPE,
    check=True,
  )
  return json.loads(done.stdout)


def count(cls: Any) -> int | None:
  """Returns the number of parameters; None without sizes or a formula."""
  ancestors = {each.__name__ for each in cls.__mro__}
  if "ClassificationModelAdam" in ancestors:
    return _count_mlp(cls)
  if not hasattr(cls, "MODEL_DIMS") or cls.NUM_LAYERS is None:
    return None
  if "OptimalScaling" in ancestors:
    width = 128 * cls.NUM_LAYERS
    return _count_dense(cls, ancestors, width=width, hidden=4 * width)
  if any(name.startswith(("GLaM", "Grok")) for name in ancestors):
    return _count_mixture(
      cls, is_grok=any(n.startswith("Grok") for n in ancestors)
    )
  return _count_dense(
    cls, ancestors, width=cls.MODEL_DIMS, hidden=cls.HIDDEN_DIMS
  )


def _count_mlp(cls: Any) -> int:
  """Embedding and softmax are one table with a bias; layers have biases."""
  width, hidden = cls.INPUT_DIM, cls.HIDDEN_DIM
  middle = (cls.NUM_LAYER - 2) * hidden * (hidden + 1)
  ends = hidden * (width + 1) + width * (hidden + 1)
  return width * (width + 1) + middle + ends


def _count_dense(
  cls: Any, ancestors: set[str], *, width: int, hidden: int
) -> int:
  """The layers of `TransformerLm`, by what the families set in `task()`."""
  is_gpt3 = bool(
    ancestors
    & {"C4SpmdGpt3AdamOrgHP", "C4SpmdPipelineGpt3AdamOrgHP", "GPT126MBase"}
  )
  is_grouped = "Llama2_7B" in ancestors
  is_llama = "BaseLLaMA" in ancestors
  heads: int = getattr(cls, "NUM_HEADS", None) or 0
  size: int = getattr(cls, "DIMS_PER_HEAD", None) or 0
  size = size or width // heads
  heads = heads or width // size
  kv_heads = heads
  if is_grouped or getattr(cls, "USE_MQA", False):
    kv_heads = cls.NUM_KV_HEADS
  attention = width * size * (2 * heads + 2 * kv_heads)
  if is_gpt3 or is_grouped:
    attention += size * (heads + 2 * kv_heads) + width
  elif not is_llama:
    attention += size  # The scale per feature.
  is_gated = is_grouped or is_llama
  up = 2 if is_gated else 1
  feed_forward = (up + 1) * width * hidden
  if not is_llama:
    feed_forward += up * hidden + width
  experts = getattr(cls, "NUM_EXPERTS", 0)
  if experts:
    feed_forward = experts * 2 * width * hidden + experts * width
  norm = width if is_grouped or is_llama else 2 * width
  layers = cls.NUM_LAYERS * (attention + feed_forward + 2 * norm)
  head = cls.VOCAB_SIZE * width * (2 if is_llama else 1)
  head += 0 if is_gpt3 or is_llama else cls.VOCAB_SIZE
  positions = 0
  if getattr(cls, "TRAINABLE_POSITION_EMB", False) and not is_grouped:
    rows = cls.TRAINABLE_PE_MAX_SEQ_LEN
    positions = width * (
      cls.MAX_SEQ_LEN if "GPT126MBase" in ancestors else rows
    )
  return layers + norm + head + positions


def _count_mixture(cls: Any, *, is_grok: bool) -> int:
  """The layers of `GlamUniTransformerLmHParams` and Grok's."""
  width, hidden, heads = cls.MODEL_DIMS, cls.HIDDEN_DIMS, cls.NUM_HEADS
  size = width // heads
  experts = cls.NUM_EXPERTS * (3 if is_grok else 2) * width * hidden
  experts += cls.NUM_EXPERTS * width
  kv_heads = cls.NUM_KV_HEADS if is_grok else heads
  attention = width * size * (2 * heads + 2 * kv_heads)
  if is_grok:
    attention += size * (heads + 2 * kv_heads) + width
    feed_forward = cls.NUM_LAYERS * experts
  else:
    attention += _BUCKETS * heads
    feed_forward = cls.NUM_LAYERS // 2 * (experts + 3 * width * hidden)
  layers = cls.NUM_LAYERS * (attention + 2 * width)
  return cls.VOCAB_SIZE * width + layers + feed_forward + width


def main(argv: Sequence[str]) -> int:
  """Prints the parameters of all classes as JSON, in a new process only."""
  root, *modules = argv
  sys.meta_path.insert(0, _Finder(pathlib.Path(root)))
  found = {
    module: {name: count(cls) for name, cls in read_classes(module).items()}
    for module in modules
  }
  print(json.dumps(found))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
