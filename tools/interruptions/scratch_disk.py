"""A small disk of its own for one run, where that is allowed."""

from collections.abc import Iterator
import contextlib
import pathlib
import subprocess

_SIZE = "32m"


@contextlib.contextmanager
def scratch_disk(folder: pathlib.Path, *, wanted: bool) -> Iterator[None]:
  """Mounts a disk in memory at a folder; without the right to, does nothing.

  Args:
    folder: An empty one.
    wanted: Whether to try.
  """
  command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "scratch"]
  mounted = wanted and _succeeds([*command, str(folder)])
  try:
    yield
  finally:
    if mounted:
      subprocess.run(["umount", "--lazy", folder], check=True)


def _succeeds(command: list[str]) -> bool:
  try:
    return subprocess.run(command, capture_output=True).returncode == 0
  except FileNotFoundError:
    return False
