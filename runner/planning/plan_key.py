"""Cache key of a plan: equal digests mean equal plans.

  sha256 of  the resolved configuration,
             shapes of the variables and of a batch (a tokenizer file may set
             them),
             the target, and whether it is compiled,
             sources: all of Paxon, and of loaded modules that no installed
             distribution has,
             distributions: versions, and the hashes of their files,
             environment variables that compilers read.

Nothing is compiled or traced for it.
"""

from collections.abc import Iterable, Mapping, Sequence
import hashlib
import importlib.metadata
import json
import os
import pathlib
import sys
from typing import Final

import fiddle as fdl

from paxon.runner import job as job_lib
from paxon.runner.configuration import dump
from paxon.runner.plan import result
from paxon.runner.plan import target as targets
from paxon.runner.planning import job_lint

# Where the cache lies changes no plan.
CACHE_VARIABLE: Final = "PAXON_CACHE_DIR"

_ROOT: Final = pathlib.Path(__file__).parents[2]
_FOLDERS: Final = (
  "inputs",
  "layers",
  "learners",
  "pipeline",
  "quantization",
  "runner",
  "sharding",
  "tasks",
)
# Figures of measurements lie in JSON files beside the sources.
_SUFFIXES: Final = (".py", ".json")
_PREFIXES: Final = ("JAX_", "XLA_", "TPU_", "LIBTPU_", "PAXON_", "CUDA_")


def of(
  config: "fdl.Config[job_lib.Job]",
  target: targets.Target,
  *,
  is_compiled: bool,
  shapes: job_lint.JobShapes,
  environ: Mapping[str, str],
  others: Sequence[str] = (),
) -> str | None:
  """Returns the digest, or None for a configuration that has no stable text.

  Args:
    config: The resolved configuration.
    target: What to plan for.
    is_compiled: Whether to compile, or to trace only.
    shapes: Of the job's variables and batch.
    environ: The environment.
    others: What else the plan depends on.
  """
  try:
    text = dump.to_text(config)
  except dump.UnstableValueError:
    return None
  content = {
    "version": result.VERSION,
    "configuration": text,
    "shapes": shapes.to_text(),
    "target": target.text,
    "is_compiled": is_compiled,
    "sources": sources(),
    "distributions": _distributions(),
    "python": sys.version,
    "environment": _environment(environ),
    "others": list(others),
  }
  return digest_of(json.dumps(content, sort_keys=True))


def sources(root: pathlib.Path = _ROOT) -> str:
  """Returns a digest of Paxon's files and of loaded modules of users.

  Args:
    root: The folder of `paxon`.
  """
  digests = {}
  for folder in _FOLDERS:
    for path in (root / folder).rglob("*"):
      if path.suffix in _SUFFIXES and not path.stem.endswith("_test"):
        name = path.relative_to(root).as_posix()
        digests[name] = digest_of(path.read_bytes())
  for name, path in _users_modules():
    digests[name] = digest_of(path.read_bytes())
  return digest_of(json.dumps(digests, sort_keys=True))


def _users_modules() -> Iterable[tuple[str, pathlib.Path]]:
  """Yields loaded modules that are not Paxon's, Python's or installed."""
  # Longest first, so that a folder inside another one is found before it.
  roots = sorted({p for p in sys.path if p}, key=len, reverse=True)
  installed = {
    root: any(pathlib.Path(root).glob("*.dist-info")) for root in roots
  }
  for name, module in sorted(sys.modules.items()):
    file = getattr(module, "__file__", None)
    top = name.partition(".")[0]
    if not file or top in sys.stdlib_module_names:
      continue
    if top == "paxon" and not file.endswith("_test.py"):
      continue  # The walk over Paxon's folders has it.
    place = next((r for r in roots if file.startswith(r + os.sep)), None)
    is_installed = place is not None and installed[place] and top != "paxon"
    if not is_installed and os.path.isfile(file):
      yield name, pathlib.Path(file)


def _distributions() -> dict[str, str]:
  """Version and a digest of the list of files, by distribution."""
  found = {}
  for one in importlib.metadata.distributions():
    # An installation over another one of the same version changes the hashes.
    record = one.read_text("RECORD") or ""
    name = one.metadata["Name"]
    found.setdefault(name, f"{one.version} {digest_of(record.encode())}")
  return found


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
  """Variables that compilers read; of those that name files, the content."""
  found = {}
  for name, value in environ.items():
    if name.startswith(_PREFIXES) and name != CACHE_VARIABLE:
      is_file = value and os.path.isfile(value)
      content = digest_of(pathlib.Path(value).read_bytes()) if is_file else ""
      found[name] = value + content
  return found


def digest_of(data: bytes | str) -> str:
  """Returns the sha256 of some bytes or of a text, in hexadecimal digits."""
  data = data.encode() if isinstance(data, str) else data
  return hashlib.sha256(data).hexdigest()
