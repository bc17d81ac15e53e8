"""A store in memory behind fsspec, for tests without servers.

As in a real one, there are no folders, a file is there only when it is whole,
and nothing can be appended to or renamed.
"""

from collections.abc import Iterator
import contextlib
import io
import itertools
from typing import Any

from etils import epath
import fsspec

# Of fsspec, which can replace a registered class but not remove one.
from fsspec.registry import _registry


class _Upload(io.BytesIO):
  """A buffer that becomes a file when it is closed without an error."""

  def __init__(self, store: "MemoryStore", name: str):
    super().__init__()
    self._store, self._name = store, name

  def __exit__(self, *exception: Any) -> None:  # pyrefly: ignore[bad-override]
    if exception[0] is None:
      self.close()

  def close(self) -> None:
    """Makes the file."""
    if not self.closed:
      self._store.pipe_file(self._name, self.getvalue())
    super().close()


class MemoryStore(fsspec.AbstractFileSystem):
  """Files by name, and no more.

  Attributes:
    files: Their contents.
    modes: The modes in which files were opened.
  """

  cachable = False
  # Of the class, because fsspec makes the instances.
  files: dict[str, bytes] = {}  # noqa: RUF012
  tags: dict[str, int] = {}  # noqa: RUF012
  modes: set[str] = set()  # noqa: RUF012
  _next_tag = itertools.count(1)

  def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:  # pyrefly: ignore[bad-override]
    """Opens a file to read or write all of it."""
    path = self._name(path)
    self.modes.add(mode)
    if mode in ("wb", "w"):
      upload = _Upload(self, path)
      return upload if "b" in mode else io.TextIOWrapper(upload, "utf-8")
    assert mode in ("r", "rb"), f"{path} is opened with mode {mode}"
    if path not in self.files:
      raise FileNotFoundError(path)
    content = self.files[path]
    return io.BytesIO(content) if "b" in mode else io.StringIO(content.decode())

  # pyrefly: ignore[bad-override]
  def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
    """Writes a file."""
    self.files[path] = value
    self.tags[path] = next(self._next_tag)

  def cat_file(
    self,
    path: str,
    start: int | None = None,
    end: int | None = None,
    **kwargs: Any,
  ) -> bytes:
    """Returns a part of a file."""
    with self.open(path) as file:
      return file.read()[start:end]

  def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
    """Returns the files and folders of a folder."""
    path = self._name(path).rstrip("/")
    if path in self.files:
      found = {path: self.info(path)}
    else:
      found = {}
      for name in self.files:
        if name.startswith(f"{path}/"):
          child, slash, _ = name[len(path) + 1 :].partition("/")
          full = f"{path}/{child}"
          directory = {"name": full, "type": "directory", "size": 0}
          found[full] = directory if slash else self.info(name)
    if not found:
      raise FileNotFoundError(path)
    return [found[name] if detail else name for name in sorted(found)]

  def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
    """Returns the facts of a file or folder."""
    path = self._name(path).rstrip("/")
    if path in self.files:
      return {
        "name": path,
        "type": "file",
        "size": len(self.files[path]),
        "etag": self.tags[path],
      }
    if any(name.startswith(f"{path}/") for name in self.files):
      return {"name": path, "type": "directory", "size": 0}
    raise FileNotFoundError(path)

  # pyrefly: ignore[bad-override]
  def rm_file(self, path: str) -> None:
    """Deletes a file."""
    del self.files[self._existing(path)]

  def _name(self, path: str) -> str:
    return str(self._strip_protocol(path))

  def _existing(self, path: str) -> str:
    if self._name(path) not in self.files:
      raise FileNotFoundError(path)
    return self._name(path)

  def cp_file(self, *args: Any, **kwargs: Any) -> None:
    """Fails."""
    raise OSError("A store does not copy here.")

  def mv(self, *args: Any, **kwargs: Any) -> None:
    """Fails."""
    raise OSError("A store cannot rename.")

  rename = mv
  move = mv


@contextlib.contextmanager
def serve(scheme: str) -> Iterator[type[MemoryStore]]:
  """Lets URLs of a scheme, such as `s3`, lead to an empty store.

  Yields:
    Its class; tests may replace methods.
  """
  kind = type(
    "Store",
    (MemoryStore,),
    {"protocol": scheme, "files": {}, "tags": {}, "modes": set()},
  )
  before = fsspec.registry.get(scheme)
  fsspec.register_implementation(scheme, kind, clobber=True)
  epath.backend.fsspec_backend._get_filesystem.cache_clear()
  try:
    yield kind
  finally:
    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    if before is None:
      # Its own package is found again.
      _registry.pop(scheme, None)
    else:
      fsspec.register_implementation(scheme, before, clobber=True)
