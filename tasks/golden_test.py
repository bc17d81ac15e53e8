"""Golden and smoke tests of every experiment."""

from etils import epath
import fiddle as fdl
import pytest

from paxon.runner.programs import train
from paxon.tasks import golden

_NAMES = golden.names()


def test_there_are_experiments():
  assert "paxon.tasks.lm.params.quickstart.PythonStdlibLm" in _NAMES


@pytest.mark.parametrize("name", _NAMES)
def test_resolves_to_its_golden_file(name):
  path = golden.path_of(name)
  assert path.exists(), "run `tools/python -m paxon.tasks.golden --update`"
  assert golden.text_of(golden.load(name)) == path.read_text(), (
    "where this is wanted, run `tools/python -m paxon.tasks.golden --update`"
  )


@pytest.mark.parametrize("name", _NAMES)
def test_a_change_of_a_knob_shows(name):
  made = golden.load(name)
  other = made.replace(seed=made.seed + 1)
  assert golden.text_of(other) != golden.path_of(name).read_text()


@pytest.mark.parametrize("name", _NAMES)
def test_trains_at_toy_size(name, tmp_path, capsys):
  config = golden.load(name).shrink().job()
  run_dir = epath.Path(tmp_path)
  assert train.run(fdl.build(config), config, run_dir) == 0
  assert (run_dir / "checkpoints" / "2").exists()
  assert (run_dir / "report.html").exists()
  assert "bits per byte" in capsys.readouterr().out
