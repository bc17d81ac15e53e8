"""Plans by the compiler's process, cached in the user's cache folder.

    PAXON_CACHE_DIR/plans, else XDG_CACHE_HOME/paxon/plans, else
    ~/.cache/paxon/plans

PAXON_CACHE_DIR=off disables the cache. Each plan is one JSON file, which may be
deleted at any time. A damaged or unreadable file counts as missing; a folder
that cannot be written is ignored. A file is named by its key, the sha256 of

  - the resolved configuration,
  - shapes of the variables and of a batch (a tokenizer file may set them),
  - the target, and whether it is compiled,
  - the sources of Paxon and of loaded modules of no installed distribution,
  - the installed distributions: versions, and the hashes of their files,
  - environment variables that compilers read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import sys
from typing import Final

import fiddle as fdl

from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner.configuration import dump
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.plan import result, topology
from paxon.runner.plan import target as targets
from paxon.runner.planning import child, job_lint

CACHE_VARIABLE: Final = "PAXON_CACHE_DIR"
OFF: Final = "off"

# The largest programs known take under five minutes on two cores.
_TIME_LIMIT: Final = 1800.0
# About 20 kB each; the oldest are deleted first.
_MAX_FILES: Final = 1000
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
# Files of these folders on which a plan may depend.
_SUFFIXES: Final = (".py", ".json")
_PREFIXES: Final = ("JAX_", "XLA_", "TPU_", "LIBTPU_", "PAXON_", "CUDA_")


def plan_for(
  target: targets.Target,
  config: "fdl.Config[job_lib.Job]",
  overrides: Sequence[overrides_lib.Override],
  *,
  experiment: str,
  shapes: job_lint.JobShapes,
  with_other_programs: bool = False,
  decode_steps: Sequence[tuple[int, int]] = (),
) -> result.Plan | result.Failure:
  """Returns a plan: cached, or made by a child process.

  Args:
    target: Target to plan for; it is compiled if its compiler is installed.
    config: The resolved configuration.
    overrides: Its overrides.
    experiment: As `--exp` takes it.
    shapes: Of the job's variables and batch.
    with_other_programs: Whether to compile evaluation and decoding too.
    decode_steps: Sequences and slots of decoding steps to plan.
  """
  missing = topology.missing(target)

  def find_key() -> str | None:
    return make_key(
      config,
      target,
      is_compiled=not missing,
      shapes=shapes,
      environ=os.environ,
      others=(experiment, f"{with_other_programs=}", f"{decode_steps=}"),
    )

  def make() -> result.Plan:
    print(f"planning for {target} ...", flush=True)
    return child.plan(
      experiment,
      overrides,
      target,
      is_compiled=not missing,
      time_limit=_TIME_LIMIT,
      with_other_programs=with_other_programs,
      decode_steps=decode_steps,
    )

  try:
    found = plan(make, find_key=find_key, environ=os.environ)
  except user_error.UserError as error:
    return result.Failure(target=target.text, message=str(error))
  except RuntimeError as error:
    first, _, rest = str(error).partition("\n")
    print(rest, file=sys.stderr)
    return result.Failure(target=target.text, message=f"{first.rstrip(':')}.")
  return dataclasses.replace(
    found,
    # Other assignments may lead to the same configuration.
    overrides=tuple(f"--fdl.{o.path}={o.text}" for o in overrides),
    notes=(*found.notes, *_how_to_compile(target, missing)),
  )


def _how_to_compile(
  target: targets.Target, missing: Sequence[str]
) -> tuple[str, ...]:
  if not missing:
    return ()
  if target.hardware.platform.needs_device:
    return (
      f"No compiler for {target.hardware.name} works without its devices, so"
      f" nothing was compiled for {target}: temporaries, peak, collectives and"
      " the step time are not known; shapes, FLOPs and the bound are.",
    )
  return (
    f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not"
    f" installed, so nothing was compiled for {target}: temporaries, peak and"
    " collectives are not known. To compile: pip install 'paxon[plan]', or with"
    " Bazel: bazel run --config=plan //runner:main -- --mode=plan ...",
  )


def plan(
  make: Callable[[], result.Plan],
  *,
  find_key: Callable[[], str | None],
  environ: Mapping[str, str],
) -> result.Plan:
  """Returns the cached plan, or makes and stores it.

  Args:
    make: Makes the plan.
    find_key: Returns the key by `make_key`; None for a plan that is not cached.
    environ: The environment.
  """
  place = folder(environ)
  key = None if place is None else find_key()
  if place is None or key is None:
    return _add_date(make())
  found = read(place, key)
  if found is None:
    found = _add_date(make())
    # A source may have been edited meanwhile; then the plan has no key.
    if find_key() == key:
      write(place, key, found)
  return found


def _add_date(plan: result.Plan) -> result.Plan:
  now = datetime.datetime.now(datetime.UTC)
  return dataclasses.replace(plan, made_at=f"{now:%Y-%m-%dT%H:%M:%SZ}")


def folder(environ: Mapping[str, str]) -> pathlib.Path | None:
  """Returns the folder of the cache, or None if it is disabled."""
  given = environ.get(CACHE_VARIABLE, "")
  if given == OFF:
    return None
  if given:
    # `bazel run` changes the working directory.
    start = environ.get("BUILD_WORKING_DIRECTORY", "")
    return pathlib.Path(start, os.path.expanduser(given), "plans")
  # By its specification, a relative path is ignored.
  caches = pathlib.Path(environ.get("XDG_CACHE_HOME", ""))
  if not caches.is_absolute():
    home = environ.get("HOME", "")
    if not os.path.isabs(home):
      return None
    caches = pathlib.Path(home) / ".cache"
  return caches / "paxon" / "plans"


def read(place: pathlib.Path, key: str) -> result.Plan | None:
  """Returns the plan with a key, or None if there is no valid one."""
  try:
    entry = json.loads((place / f"{key}.json").read_text())
    if entry["key"] != key:
      return None
    if digest(entry["plan"]) != entry["digest"]:
      return None
    (plan,) = result.from_json(entry["plan"])
  except (OSError, ValueError, TypeError, KeyError, AttributeError):
    return None
  return dataclasses.replace(plan, is_from_cache=True)


def write(place: pathlib.Path, key: str, plan: result.Plan) -> None:
  """Stores a plan; does nothing if the folder cannot be written."""
  text = result.to_json((plan,))
  entry = {"key": key, "digest": digest(text), "plan": text}
  try:
    files.write_text(place / f"{key}.json", json.dumps(entry))
    kept = sorted(place.glob("*.json"), key=lambda p: p.stat().st_mtime)
    for old in kept[:-_MAX_FILES]:
      old.unlink(missing_ok=True)
  except OSError:
    return


def make_key(
  config: "fdl.Config[job_lib.Job]",
  target: targets.Target,
  *,
  is_compiled: bool,
  shapes: job_lint.JobShapes,
  environ: Mapping[str, str],
  others: Sequence[str] = (),
) -> str | None:
  """Returns the key, or None for a configuration that has no stable text.

  Nothing is traced or compiled.

  Args:
    config: The resolved configuration.
    target: Target to plan for.
    is_compiled: Whether to compile, or to trace only.
    shapes: Of the job's variables and batch.
    environ: The environment.
    others: Other values that the plan depends on.
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
    "sources": digest_sources(),
    "distributions": _distributions(),
    "python": sys.version,
    "environment": _environment(environ),
    "others": list(others),
  }
  return digest(json.dumps(content, sort_keys=True))


def digest_sources(root: pathlib.Path = _ROOT) -> str:
  """Returns a digest of Paxon's files and of loaded modules of users."""
  digests = {}
  for folder in _FOLDERS:
    for path in (root / folder).rglob("*"):
      if path.suffix in _SUFFIXES and not path.stem.endswith("_test"):
        name = path.relative_to(root).as_posix()
        digests[name] = digest(path.read_bytes())
  for name, path in _users_modules():
    digests[name] = digest(path.read_bytes())
  return digest(json.dumps(digests, sort_keys=True))


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
  """Returns versions and digests of the lists of files, by distribution."""
  found = {}
  for one in importlib.metadata.distributions():
    # An installation over another one of the same version changes the hashes.
    record = one.read_text("RECORD") or ""
    name = one.metadata["Name"]
    found.setdefault(name, f"{one.version} {digest(record.encode())}")
  return found


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
  """Returns variables that compilers read; for paths, the files' contents."""
  found = {}
  for name, value in environ.items():
    if name.startswith(_PREFIXES) and name != CACHE_VARIABLE:
      is_file = value and os.path.isfile(value)
      content = digest(pathlib.Path(value).read_bytes()) if is_file else ""
      found[name] = value + content
  return found


def digest(data: bytes | str) -> str:
  """Returns the sha256 in hexadecimal digits."""
  data = data.encode() if isinstance(data, str) else data
  return hashlib.sha256(data).hexdigest()
