"""Tests for the stored settings of a run."""

from etils import epath
import pytest

from paxon.runner import user_error
from paxon.runner.configuration import overrides
from paxon.runner.training import stored_settings

GIVEN = (
  overrides.Override("num_layers", "3"),
  overrides.Override("task.learner.max_grad_norm", "None"),
)


def test_settings_come_back_as_they_were_typed(tmp_path):
  folder = epath.Path(tmp_path)
  assert stored_settings.read(folder) is None
  stored_settings.store("a.b.C", [], folder)
  assert stored_settings.read(folder).overrides == ()
  stored_settings.store("a.b.C", GIVEN, folder)
  settings = stored_settings.read(folder)
  assert settings.experiment == "a.b.C"
  assert settings.overrides == GIVEN


def test_any_text_of_a_value_comes_back(tmp_path):
  folder = epath.Path(tmp_path)
  given = (overrides.Override("a['k'].b[0]", 'x "=" \udcff\n'),)
  stored_settings.store("a.b.C", given, folder)
  assert stored_settings.read(folder).overrides == given


@pytest.mark.parametrize(
  "text", ["", "[]", "{}", '{"experiment": "a.C", "overrides": [3]}']
)
def test_a_damaged_file_is_named(tmp_path, text):
  (tmp_path / "settings.json").write_text(text)
  with pytest.raises(
    user_error.UserError, match=r"settings.json does not hold the settings"
  ):
    stored_settings.read(epath.Path(tmp_path))
