"""Object stores and the Hugging Face Hub: packages, requests and errors.

Files of stores have URLs (`gs://`, `s3://`, `az://`, `hf://`, any of fsspec).
The packages of stores are optional; fsspec finds them by the scheme of a URL.
Requests that fail for a transient reason are repeated, and every error is one
line that names the file.
"""

from collections.abc import Callable, Iterator
import contextlib
import errno
import os
import random
import time
from typing import Any, TypeVar

import fsspec

from paxon.inputs import optional_library

_T = TypeVar("_T")
# The package, and the extra of Paxon with it, by the scheme of URLs.
_PACKAGES = {
  **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gcs")),
  **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
  **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs", "azure")),
  "hf": ("huggingface_hub", "data"),
}
# How to give credentials, by package.
_CREDENTIALS = {
  "gcsfs": "run `gcloud auth application-default login`",
  "s3fs": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
  "adlfs": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
  "huggingface_hub": "set HF_TOKEN",
}
# Packages whose errors are those of a store, whatever their classes.
_LIBRARIES = (
  *("adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google"),
  *("httpcore", "httpx", "httpx2", "huggingface_hub", "requests", "s3fs"),
)
_PERMANENT = (
  FileNotFoundError,
  PermissionError,
  FileExistsError,
  IsADirectoryError,
  NotADirectoryError,
)
HUB = "hf://"
_MODEL_FILES = (
  *(".jinja", ".json", ".model", ".safetensors", ".tiktoken", ".txt"),
)
# Errors of a library that was told not to use the network, or has none.
_OFFLINE = ("OfflineModeIsEnabled", "LocalEntryNotFoundError")
_ATTEMPTS = 5
# Seconds before the second attempt; doubled before each later one.
_WAIT = 0.25
_MAX_TEXT = 300


class StoreError(ValueError):
  """A store failed, rejected a request, or does not have a file."""


def is_remote(path: str) -> bool:
  """Whether a path is a URL."""
  return "://" in path


def check_package(path: str) -> None:
  """Checks that the package of a URL's store is installed.

  Paths of a disk, and schemes of other stores, pass.

  Raises:
    MissingLibraryError: It is not; the message names the package and extra.
  """
  scheme = path.partition("://")[0]
  if not is_remote(path) or scheme not in _PACKAGES:
    return
  package, extra = _PACKAGES[scheme]
  try:
    fsspec.get_filesystem_class(scheme)
  except ImportError as error:
    # A package that is installed may lack one of its dependencies.
    missing = getattr(error.__cause__, "name", None) or package
    if missing.partition(".")[0] != package:
      raise
    raise optional_library.MissingLibraryError(
      f"{path} needs the package {package}: pip install 'paxon[{extra}]'",
      name=package,
    ) from error


def prepare(path: str) -> None:
  """Prepares for access to a path of a store.

  Listings are not cached, because other processes write to a run directory,
  too. And epath must not use TensorFlow where it happens to be installed: it
  finds other credentials, and has no `s3://`.

  Raises:
    MissingLibraryError: The package of the store is missing.
  """
  os.environ.setdefault("EPATH_USE_TF", "false")
  for scheme in _PACKAGES:
    options = fsspec.config.conf.setdefault(scheme, {})
    options.setdefault("use_listings_cache", False)
  check_package(path)


def open_store(path: str) -> tuple[Any, str]:
  """Returns the fsspec file system of a URL, and the path in it.

  Raises:
    StoreError: The store is unknown, or its package is missing.
  """
  check_package(path)
  with explain(path):
    store, name = fsspec.core.url_to_fs(path)
  return store, name


def request(
  path: str, call: Callable[[Any, str], _T], *, action: str = "read"
) -> _T:
  """Returns the result of a call with a URL's file system and path in it.

  A call that fails for a transient reason is repeated, five attempts in all.

  Args:
    path: The URL.
    call: Called with what `open_store` returns.
    action: Past participle, for messages.

  Raises:
    StoreError: The last attempt failed, or one for a permanent reason, such as
      a missing file or no permission.
  """
  store, name = open_store(path)
  with explain(path, action=action):
    for attempt in range(_ATTEMPTS - 1):
      try:
        return call(store, name)
      except Exception as error:
        if not _is_transient(error):
          raise
      # The hosts of a job do not retry at the same time.
      time.sleep(_WAIT * 2**attempt * random.uniform(0.5, 1.5))
  with explain(path, action=f"{action} in {_ATTEMPTS} attempts"):
    return call(store, name)


def find_snapshot(path: str) -> str:
  """Returns the local folder of a model of the Hub, which is downloaded once.

  Args:
    path: `hf://org/name[@revision][/folder]`. `HF_ENDPOINT` names a mirror.

  Raises:
    StoreError: It does not exist, or cannot be reached and is not in the cache.
  """
  check_package(path)
  parts = path.removeprefix(HUB).strip("/").split("/")
  if not path.startswith(HUB) or len(parts) < 2 or not all(parts):
    raise StoreError(
      f"{path} is no model of the Hub; give hf://org/name, or"
      " hf://org/name@revision/folder."
    )
  name, _, revision = f"{parts[0]}/{parts[1]}".partition("@")
  folder = "/".join(parts[2:])
  prefix = f"{folder}/" if folder else ""
  with explain(path, action="downloaded"):
    found = optional_library.hub().snapshot_download(
      name,
      revision=revision or None,
      allow_patterns=[f"{prefix}*{ending}" for ending in _MODEL_FILES],
    )
  return os.path.join(found, folder) if folder else found


def upload(file: str, path: str) -> None:
  """Copies a file of a disk to a URL, where it appears when it is complete."""
  request(
    path, lambda store, name: store.put_file(file, name), action="written"
  )


@contextlib.contextmanager
def explain(path: str, *, action: str = "read") -> Iterator[None]:
  """Raises errors of a store as StoreError, one line that names the file."""
  try:
    yield
  except (optional_library.MissingLibraryError, StoreError):
    raise
  except ImportError as error:
    raise StoreError(
      f"{path} cannot be {action} without the library of its store: {error}."
    ) from error
  except Exception as error:
    if not isinstance(error, OSError | ValueError) and not _is_of_store(error):
      raise
    reason = _describe(path, error)
    raise StoreError(f"{path} cannot be {action}: {reason}.") from error


def describe(error: Exception) -> str | None:
  """Returns the error of a store's library in one line; None for others."""
  if isinstance(error, StoreError):
    return str(error)
  return f"{_describe('', error)}." if _is_of_store(error) else None


def _describe(path: str, error: Exception) -> str:
  text = " ".join(str(error).split())
  # Of Azure, with the headers and the content of the response after it.
  text = text.partition(" RequestId:")[0][:_MAX_TEXT].rstrip(".")
  text = text or type(error).__name__
  package, _ = _PACKAGES.get(path.partition("://")[0], ("", ""))
  advice = _CREDENTIALS.get(package)
  if _lacks_credentials(error) and advice:
    return f"no valid credentials ({text}); {advice}"
  if type(error).__name__ in _OFFLINE:
    why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else text
    return f"it is not in the cache of the Hub, which is not asked ({why})"
  if isinstance(error, FileNotFoundError) or _is_missing(error):
    return f"it, or its bucket, does not exist ({text})"
  if isinstance(error, PermissionError):
    return (
      f"permission denied ({text}); the credentials must allow to read it and"
      " to list its folder"
    )
  return text


def _is_of_store(error: BaseException) -> bool:
  # adlfs raises RuntimeError from errors of Azure's library.
  cause = error.__cause__
  return type(error).__module__.partition(".")[0] in _LIBRARIES or (
    cause is not None and _is_of_store(cause)
  )


def _is_missing(error: BaseException) -> bool:
  """Whether Azure's library has not found a container or blob."""
  cause = error.__cause__
  return type(error).__name__ == "ResourceNotFoundError" or (
    cause is not None and _is_missing(cause)
  )


def _lacks_credentials(error: Exception) -> bool:
  names = [each.__name__ for each in type(error).__mro__]
  return any("Credential" in name for name in names)


def _is_transient(error: Exception) -> bool:
  """Whether another attempt may succeed."""
  if isinstance(error, _PERMANENT) or _lacks_credentials(error):
    return False
  if type(error).__name__ in _OFFLINE:
    return False
  response = getattr(error, "response", None)
  status = getattr(response, "status_code", None) or getattr(
    error, "status", None
  )
  if isinstance(status, int) and 400 <= status < 500:
    # Timeouts, and too many requests.
    return status in (408, 429)
  if isinstance(error, OSError):
    return error.errno != errno.EINVAL
  return _is_of_store(error)
