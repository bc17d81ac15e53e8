"""Wheels and source archives whose bytes depend only on the commit."""

from collections.abc import Sequence
import contextlib
import dataclasses
import gzip
import hashlib
import io
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
from typing import Final

from paxon.tools import part_wheel
from paxon.tools.releasing import release_checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
  """Properties of a machine that must not change an archive.

  Attributes:
    umask: Permissions that new files lack.
    time_zone: The variable TZ.
    locale: The variable LC_ALL.
    hash_seed: Seed of the order of Python's sets.
    folder: Prefix of the name of the folder.
  """

  umask: int
  time_zone: str
  locale: str
  hash_seed: int
  folder: str


SURROUNDINGS: Final = (
  Surroundings(
    umask=0o022, time_zone="UTC", locale="C.UTF-8", hash_seed=0, folder="a"
  ),
  Surroundings(
    umask=0o077,
    time_zone="Pacific/Kiritimati",
    locale="C",
    hash_seed=4321,
    folder="second build, elsewhere ",
  ),
)


def export(root: pathlib.Path, commit: str, folder: pathlib.Path) -> None:
  """Writes the files of a commit, and nothing else of a checkout.

  Args:
    root: The checkout.
    commit: The commit.
    folder: A folder, which is created.
  """
  command = ["git", "-c", "safe.directory=*", "-C", str(root)]
  content = subprocess.run(
    [*command, "archive", "--format=tar", commit],
    check=True,
    capture_output=True,
  ).stdout
  with tarfile.open(fileobj=io.BytesIO(content)) as archive:
    archive.extractall(folder, filter="data")


def build(
  root: pathlib.Path, commit: str, out: pathlib.Path, around: Surroundings
) -> list[pathlib.Path]:
  """Builds the source archive and the wheels of a commit.

  The wheel `paxon` is built from the source archive.

  Args:
    root: The checkout.
    commit: The commit.
    out: Folder of the archives.
    around: Properties of the machine.
  """
  epoch = int(
    release_checks.run_git(root, "show", "-s", "--format=%ct", commit)
  )
  environ = os.environ | {
    "SOURCE_DATE_EPOCH": str(epoch),
    "TZ": around.time_zone,
    "LC_ALL": around.locale,
    "PYTHONHASHSEED": str(around.hash_seed),
  }
  with (
    _umask(around.umask),
    tempfile.TemporaryDirectory(prefix=around.folder) as scratch,
  ):
    copy = pathlib.Path(scratch, "paxon")
    export(root, commit, copy)
    _run_build(copy, out, environ)
    for name in part_wheel.PARTS:
      sources = pathlib.Path(scratch, name)
      sources.mkdir()
      part_wheel.write_sources(copy, name, sources)
      _run_build(sources, out, environ, "--wheel")
  for path in out.glob("*.tar.gz"):
    normalize(path, epoch)
  return sorted(path for path in out.iterdir() if path.is_file())


@contextlib.contextmanager
def _umask(value: int):
  before = os.umask(value)
  try:
    yield
  finally:
    os.umask(before)


def _run_build(
  sources: pathlib.Path,
  out: pathlib.Path,
  environ: dict[str, str],
  *options: str,
) -> None:
  """Builds with the tools of this environment, whatever the umask is.

  Raises:
    ValueError: The build failed.
  """
  for path in sources.rglob("*"):
    is_program = path.is_dir() or path.stat().st_mode & 0o100
    path.chmod(0o755 if is_program else 0o644)
  done = subprocess.run(
    [
      *(sys.executable, "-m", "build", "--no-isolation"),
      *(*options, "--outdir", str(out), str(sources)),
    ],
    env=environ,
    umask=0o022,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  if done.returncode:
    raise ValueError(f"The build of {sources.name} failed:\n{done.stdout}")


def normalize(path: pathlib.Path, epoch: int) -> None:
  """Rewrites a source archive without traces of its build.

  Members are sorted and belong to root, and all times are `epoch`.

  Args:
    path: The archive, a `.tar.gz`.
    epoch: Seconds since 1970.
  """
  content = io.BytesIO()
  with (
    tarfile.open(path) as old,
    tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new,
  ):
    for member in sorted(old, key=lambda member: member.name):
      member.uid = member.gid = 0
      member.uname = member.gname = "root"
      member.mtime = epoch
      member.pax_headers = {}
      new.addfile(member, old.extractfile(member) if member.isfile() else None)
  with (
    path.open("wb") as file,
    gzip.GzipFile(
      filename="", mode="wb", fileobj=file, mtime=epoch
    ) as compressed,
  ):
    compressed.write(content.getvalue())


def digest(path: pathlib.Path) -> str:
  """Returns the sha256 of a file in hexadecimal digits."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def build_twice(
  root: pathlib.Path,
  commit: str,
  out: pathlib.Path,
  surroundings: Sequence[Surroundings] = SURROUNDINGS,
) -> dict[str, str]:
  """Builds a commit in two surroundings, and compares the archives.

  Args:
    root: The checkout.
    commit: The commit.
    out: Folder of the archives of the first build.
    surroundings: Properties of the machine of each build.

  Returns:
    The sha256 of each archive by name.

  Raises:
    ValueError: A build failed, or archives differ.
  """
  first = {
    path.name: digest(path)
    for path in build(root, commit, out, surroundings[0])
  }
  for around in surroundings[1:]:
    with tempfile.TemporaryDirectory() as other:
      found = {
        path.name: digest(path)
        for path in build(root, commit, pathlib.Path(other), around)
      }
    different = sorted(
      name
      for name in first.keys() | found.keys()
      if first.get(name) != found.get(name)
    )
    if different:
      raise ValueError(
        f"Two builds of {commit} differ in {', '.join(different)}."
      )
  return first
