"""Tests for the packages of object stores."""

import sys

from fsspec.implementations import memory
import pytest

from paxon.inputs import optional_library, stores


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
  """The file systems that fsspec has loaded, by scheme: none."""
  found = sys.modules["fsspec.registry"]._registry
  for scheme in list(found):
    monkeypatch.delitem(found, scheme)
  return found


@pytest.mark.parametrize(
  ("url", "package", "extra"),
  [
    ("gs://bucket/a.txt", "gcsfs", "gcs"),
    ("s3://bucket/a.txt", "s3fs", "s3"),
    ("az://bucket/a.txt", "adlfs", "azure"),
    ("hf://org/name", "huggingface_hub", "data"),
  ],
)
def test_a_missing_package_is_named_with_its_extra(
  url, package, extra, monkeypatch
):
  # An entry of None makes the import fail.
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(optional_library.MissingLibraryError) as caught:
    stores.check_package(url)
  expected = f"{url} needs the package {package}: pip install 'paxon[{extra}]'"
  assert str(caught.value) == expected


def test_other_paths_need_no_package(loaded, monkeypatch):
  monkeypatch.setitem(sys.modules, "s3fs", None)
  monkeypatch.setitem(loaded, "s3", memory.MemoryFileSystem)
  for path in ("/a/b", "a.txt", "s3://bucket/a", "file:///a", "other://b/a"):
    stores.check_package(path)


def test_a_damaged_package_is_not_reported_as_missing(monkeypatch):
  def get_filesystem_class(scheme):
    raise ImportError(scheme) from ModuleNotFoundError(name="aiobotocore")

  monkeypatch.setattr("fsspec.get_filesystem_class", get_filesystem_class)
  with pytest.raises(ImportError, match="s3") as caught:
    stores.check_package("s3://bucket/a")
  assert not isinstance(caught.value, optional_library.MissingLibraryError)
