"""Tests for the experiments on text from Debian packages."""

import fiddle as fdl
import pytest

from paxon.inputs import unset_input
from paxon.inputs.sources import example_source
from paxon.tasks.lm.params import corpora


@pytest.mark.parametrize(
  ("made", "package"),
  [
    (corpora.WordNetLm(), "wordnet-base"),
    (corpora.PythonManualLm(), "python3.11-doc"),
  ],
)
def test_error_without_folder_names_the_package(made, package):
  given = fdl.build(made.datasets()["train"])
  assert isinstance(given, unset_input.UnsetInput)
  with pytest.raises(ValueError, match=f"folder is not set.*install {package}"):
    given.get_next()


@pytest.mark.parametrize("kind", [corpora.WordNetLm, corpora.PythonManualLm])
def test_one_example_in_fifty_is_held_out(kind):
  # Not built: building checks types, which loads the vocabulary.
  splits = kind(folder="/nowhere").datasets()
  train, other = (splits[name].examples for name in ("train", "validation"))
  sources = [train.source, other.source]
  assert all(fdl.get_callable(s) is example_source.HeldOut for s in sources)
  assert [source.is_held_out for source in sources] == [False, True]
  assert other.num_epochs == 1
  assert kind(folder="/nowhere").job().train_input == splits["train"]


def test_error_for_missing_files_names_the_package(tmp_path):
  with pytest.raises(FileNotFoundError, match="apt-get install wordnet-base"):
    corpora.WordNetTask(folder=str(tmp_path))()
  with pytest.raises(FileNotFoundError, match=r"install python3\.11-doc"):
    corpora.open_pages(str(tmp_path))
