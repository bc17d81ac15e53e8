"""`tools/release`: checks and builds a release; uploads nothing.

Writes to the output folder: the wheels `paxon`, `paxon-layers` and
`paxon-plan`, the source archive, `requirements-PLATFORM.txt` with hashes, a
bill of materials of each platform (CycloneDX), `Containerfile`, the release
notes, the site, and `SHA256SUMS`.
"""

import argparse
from collections.abc import Sequence
import pathlib
import subprocess
import sys
import tempfile

from paxon.tools.dependencies import workspace
from paxon.tools.releasing import (
  archives,
  changelog,
  release_checks,
  release_files,
)


def make(root: pathlib.Path, version: str, out: pathlib.Path) -> None:
  """Writes the files of a release of the commit that is checked out.

  Args:
    root: The checkout.
    version: The version.
    out: An empty folder.

  Raises:
    ValueError: Two builds differ, or a build failed.
  """
  commit = release_checks.run_git(root, "rev-parse", "HEAD")
  for name, sha256 in archives.build_twice(root, commit, out).items():
    print(f"{sha256}  {name}  (two builds are equal)", flush=True)
  wheel = out / f"paxon-{version}-py3-none-any.whl"
  if not wheel.is_file():
    raise ValueError(
      f"{wheel.name} was not built: __version__ must be {version}."
    )
  with tempfile.TemporaryDirectory() as scratch:
    copy = pathlib.Path(scratch, "paxon")
    archives.export(root, commit, copy)
    for platform in release_files.LOCKS:
      path = out / f"requirements-{platform}.txt"
      path.write_text(release_files.freeze(copy, platform, version))
      release_files.write_bill(path, wheel, version)
    entry, *_ = changelog.parse((copy / changelog.FILE).read_text())
  (out / "NOTES.md").write_text(entry.to_markdown())
  (out / "Containerfile").write_text(
    release_files.make_container_file(version, wheel.name)
  )
  release_files.write_site(root, commit, out, version)
  lines = [
    f"{archives.digest(path)}  {path.name}\n" for path in sorted(out.iterdir())
  ]
  (out / release_files.SUMS).write_text("".join(lines))


def _check_upgrade(root: pathlib.Path, previous: str | None) -> bool:
  """Whether a run of the previous version resumes, if there is one."""
  if previous is None:
    print("upgrade: not tested, because no earlier version has a tag")
    return True
  command = [str(root / "tools" / "check_upgrade"), previous]
  return not subprocess.run(command, check=False).returncode


def main(argv: Sequence[str]) -> int:
  """Makes a release; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="tools/release",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("version", metavar="VERSION", help="such as 0.2.0")
  parser.add_argument(
    "--output", type=pathlib.Path, default="dist", help="an empty folder"
  )
  parser.add_argument(
    "--previous",
    metavar="COMMIT",
    help="earlier version whose run must resume; by default the newest tag",
  )
  parser.add_argument(
    "--rehearse",
    action="store_true",
    help="build even if the tree, the tag or the changelog is not ready",
  )
  flags = parser.parse_args(argv)
  root = workspace.find_root(pathlib.Path(__file__))
  out = flags.output.absolute()
  try:
    release_checks.check_version(flags.version)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
      raise ValueError(f"--output must be an empty folder, got {out}.")
    problems = release_checks.find_problems(root, flags.version)
    for problem in problems:
      print(f"release: {problem}", file=sys.stderr)
    if problems and not flags.rehearse:
      return 1
    out.mkdir(parents=True, exist_ok=True)
    make(root, flags.version, out)
  except ValueError as error:
    print(f"release: {error}", file=sys.stderr)
    return 2
  previous = flags.previous or release_checks.find_previous(root, flags.version)
  if not _check_upgrade(root, previous):
    return 1
  print(f"release: {out} has {len(list(out.iterdir()))} files")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
