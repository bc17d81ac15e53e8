"""Tests for missing optional libraries."""

import importlib

import pytest

from paxon.inputs import optional_library


@pytest.mark.parametrize(
  ("opened", "message"),
  [
    (optional_library.seqio, "SeqIO is not .* --config=tf .* its extra `tf`"),
    (optional_library.tensorflow, "SeqIO is not installed"),
    (optional_library.array_record, "array_record is not installed: .*=data"),
    (optional_library.datasets, "datasets is not installed"),
    (optional_library.grain, "grain is not installed"),
    (optional_library.parquet, "pyarrow is not installed"),
  ],
)
def test_the_error_has_install_instructions(opened, message, monkeypatch):
  def import_module(name):
    raise ModuleNotFoundError(name=name.partition(".")[0])

  monkeypatch.setattr(importlib, "import_module", import_module)
  # Programs print a ValueError in one line.
  with pytest.raises(ValueError, match=message) as caught:
    opened()
  assert isinstance(caught.value, optional_library.MissingLibraryError)


def test_missing_dependencies_of_a_library_are_not_hidden(monkeypatch):
  def import_module(name):
    raise ModuleNotFoundError("No module named 'deep'", name="deep")

  monkeypatch.setattr(importlib, "import_module", import_module)
  for opened in (optional_library.seqio, optional_library.parquet):
    with pytest.raises(ModuleNotFoundError, match="deep"):
      opened()


def test_an_incompatible_tensorflow_is_not_reported_as_missing(monkeypatch):
  def import_module(name):
    raise ModuleNotFoundError("No module", name="tensorflow.compat.v3")

  monkeypatch.setattr(importlib, "import_module", import_module)
  with pytest.raises(ModuleNotFoundError, match="No module") as caught:
    optional_library.seqio()
  assert not isinstance(caught.value, optional_library.MissingLibraryError)
