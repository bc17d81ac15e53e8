"""Golden and smoke tests of every experiment."""

from etils import epath
import fiddle as fdl
import pytest

from paxon.runner.programs import decode, evaluate, train
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


def test_every_golden_file_has_its_experiment():
  paths = {golden.path_of(name) for name in _NAMES}
  found = {p for path in paths for p in path.parent.glob("*.txt")}
  assert found == paths, "remove the file of an experiment that is gone"


@pytest.mark.parametrize("name", _NAMES)
def test_shrinks_to_toy_size(name):
  """A `shrink` that forgets a knob leaves a model that takes minutes."""
  made = golden.load(name).shrink()
  total = golden.text_of(made).rpartition("trainable: ")[2]
  assert int(total.replace(",", "")) <= 100_000
  job = made.job()
  assert job.train_input.global_batch_size * job.train_input.length <= 1024
  assert job.num_train_steps <= 2


@pytest.mark.parametrize("name", _NAMES)
def test_a_change_of_a_knob_shows(name):
  made = golden.load(name)
  other = made.replace(seed=made.seed + 1)
  assert golden.text_of(other) != golden.path_of(name).read_text()


@pytest.mark.parametrize("name", _NAMES)
def test_trains_at_toy_size(name, tmp_path, capsys):
  config = golden.load(name).shrink().job()
  run_dir = epath.Path(tmp_path)
  # In every mode: what trains is what is evaluated and sampled.
  assert train.run(fdl.build(config), config, run_dir) == 0
  assert (run_dir / "checkpoints" / "2").exists()
  assert (run_dir / "report.html").exists()
  assert "bits per byte" in capsys.readouterr().out
  assert evaluate.run(fdl.build(config), run_dir) == 0
  assert "validation" in capsys.readouterr().out
  assert decode.run(fdl.build(config), run_dir, None) == 0
  assert "--- sample 1 ---" in capsys.readouterr().out
