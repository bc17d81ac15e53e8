"""Golden and smoke tests of every experiment.

Many experiments differ in sizes alone, so that they shrink to the same toy;
each toy is trained once.
"""

from collections.abc import Callable, Sequence
import math

from etils import epath
import fiddle as fdl
import pytest

from paxon.runner import experiment
from paxon.runner.configuration import dump
from paxon.runner.programs import decode, evaluate, train
from paxon.runner.programs.plan import job_lint
from paxon.sharding import mesh as meshes
from paxon.tasks import golden

_NAMES = golden.names()


def _text(made: experiment.Experiment) -> str:
  """Returns the configuration without the words that name the experiment."""
  config = made.job()
  config.experiment = config.task.name = ""
  return dump.to_text(config)


def _distinct(
  names: Sequence[str], change: Callable[..., experiment.Experiment]
) -> list[str]:
  """Returns the first of all experiments that become the same one."""
  first: dict[str, str] = {}
  for name in names:
    first.setdefault(_text(change(golden.load(name))), name)
  return list(first.values())


_TOYS = _distinct(_NAMES, lambda made: made.shrink())
# Names say how long an experiment runs, which the mesh does not care about.
_LAYOUTS = _distinct(_NAMES, lambda made: made.replace(num_train_steps=1))


def test_there_are_experiments():
  assert "paxon.tasks.lm.params.quickstart.PythonStdlibLm" in _NAMES
  assert "paxon.tasks.lm.params.lm_cloud.LmCloudSpmd1024B" in _NAMES
  # Bases are no experiments.
  assert not [name for name in _NAMES if name.endswith(("Decoder", "Spmd"))]


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


@pytest.mark.parametrize("name", _LAYOUTS)
def test_the_mesh_fits_the_model(name):
  job = fdl.build(golden.load(name).job())
  spec = meshes.MeshSpec.parse(job.mesh)
  sizes = [*spec.ici.values(), *spec.dcn.values()]
  findings = job_lint.check(
    job,
    num_devices=math.prod(size for size in sizes if size != -1),
    num_slices=math.prod(spec.dcn.values()),
  )
  assert not [found.message for found in findings if found.is_error]


@pytest.mark.parametrize("name", _TOYS)
def test_shrinks_to_toy_size(name):
  """A `shrink` that forgets a knob leaves a model that takes minutes."""
  made = golden.load(name).shrink()
  total = golden.text_of(made).rpartition("trainable: ")[2]
  assert int(total.replace(",", "")) <= 100_000
  job = made.job()
  assert job.train_input.global_batch_size * job.train_input.length <= 1024
  assert job.num_train_steps <= 2


@pytest.mark.parametrize("name", _TOYS)
def test_a_change_of_a_knob_shows(name):
  made = golden.load(name)
  other = made.replace(seed=made.seed + 1)
  assert _text(other) != _text(made)


@pytest.mark.parametrize("name", _TOYS)
def test_trains_at_toy_size(name, tmp_path, capsys):
  config = golden.load(name).shrink().job()
  run_dir = epath.Path(tmp_path)
  # In every mode: what trains is what is evaluated and sampled.
  assert train.run(fdl.build(config), config, run_dir) == 0
  assert (run_dir / "checkpoints" / "2").exists()
  assert (run_dir / "report.html").exists()
  # Synthetic tokens stand for no bytes.
  figure = "bits_per_byte" if config.task.metrics else "accuracy"
  assert figure in capsys.readouterr().out
  assert evaluate.run(fdl.build(config), run_dir) == 0
  assert "validation" in capsys.readouterr().out
  if config.generation is None:
    return
  assert decode.run(fdl.build(config), run_dir, None) == 0
  assert "--- sample 1 ---" in capsys.readouterr().out
