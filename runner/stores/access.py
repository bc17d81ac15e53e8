"""Checks that a store can hold a run, before the run starts."""

from collections.abc import Callable, Iterator
import contextlib
import os
import time
import uuid

from etils import epath

from paxon.inputs import stores

# A store that lists a new object later than this cannot keep a run: the next
# process would miss its latest checkpoint.
_MAX_LISTING_SECONDS = 5.0


class UnusableStoreError(ValueError):
  """A store cannot do what a run needs; one line."""


def try_out(
  folder: epath.Path, *, sleep: Callable[[float], None] = time.sleep
) -> None:
  """Writes, overwrites, reads, lists and deletes an object in a folder.

  Args:
    folder: The folder, which need not exist.
    sleep: Replaced in tests.

  Raises:
    UnusableStoreError: The store does not do one of them.
  """
  path = folder / f".try-{uuid.uuid4().hex[:12]}"
  with _explain(folder, "write"):
    path.write_bytes(b"1")
  try:
    with _explain(folder, "overwrite"):
      path.write_bytes(b"22")
    with _explain(folder, "read"):
      found = path.read_bytes()
    if found != b"22":
      raise UnusableStoreError(
        f"{os.fspath(folder)} cannot be used: an object that was overwritten"
        f" still has its old content ({found!r} instead of b'22')."
      )
    _wait_for_listing(path, sleep)
    with _explain(folder, "delete"):
      path.unlink()
  except UnusableStoreError:
    with contextlib.suppress(Exception):
      path.unlink()
    raise


def _wait_for_listing(path: epath.Path, sleep: Callable[[float], None]) -> None:
  waited, pause = 0.0, 0.1
  while True:
    with _explain(path.parent, "list"):
      names = {each.name for each in path.parent.iterdir()}
    if path.name in names:
      return
    if waited > _MAX_LISTING_SECONDS:
      raise UnusableStoreError(
        f"{os.fspath(path.parent)} cannot be used: an object is not listed"
        f" {waited:.0f} s after it was written, and a run finds its latest"
        " checkpoint by listing."
      )
    sleep(pause)
    waited, pause = waited + pause, pause * 2


@contextlib.contextmanager
def _explain(folder: epath.Path, action: str) -> Iterator[None]:
  try:
    with stores.explain(os.fspath(folder), action="used"):
      yield
  except stores.StoreError as error:
    raise UnusableStoreError(
      f"{str(error).rstrip('.')}; a run must be able to {action} objects there."
    ) from error
