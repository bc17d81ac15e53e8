"""Golden, lint and smoke tests of every experiment.

Many experiments differ only in size: equal models are traced once, and of the
toys those are trained that together have every part in every place.
"""

from collections.abc import Sequence
import difflib
import functools
import math
import pathlib
import re

from etils import epath
import fiddle as fdl
from fiddle import selectors
import jax
import numpy as np
import pytest

from paxon.inputs import base_input, unset_input
from paxon.inputs.sources import python_stdlib
from paxon.learners import train_state, train_step
from paxon.runner import experiment, knobs
from paxon.runner import job as job_lib
from paxon.runner.configuration import dump
from paxon.runner.evaluation import evaluate
from paxon.runner.generation import decode
from paxon.runner.planning import job_lint
from paxon.runner.session import model_loss
from paxon.runner.training import train
from paxon.sharding import initialization
from paxon.sharding import mesh as meshes
from paxon.tasks import golden

_PARAMS = "paxon.tasks.lm.params."
_NAMES = golden.names()
_MODULES = sorted({name.rpartition(".")[0] for name in _NAMES})
_MEND = (
  "where this is wanted, run `tools/python -m paxon.tasks.golden --update`"
)

# One of each family goes through all programs. Those of Pax that are trained by
# the commands of its README, of lm_cloud and C4, are in `readme_commands_test`;
# `HuggingFaceLm` goes through them in `fine_tune_a_model_test`.
_WHOLE = [
  f"{_PARAMS}{name}"
  for name in (
    "quickstart.PythonStdlibLm",
    "bert.BertSpmdL4H128",
  )
]


# Several tests have it, and none changes it.
@functools.cache
def _toy(name: str) -> fdl.Config[job_lib.Job]:
  return golden.load(name).shrink().job()


def _text(made: experiment.Experiment) -> str:
  """Returns the configuration without the name of the experiment."""
  config = made.job()
  config.experiment = config.task.name = ""
  return dump.to_text(config)


@functools.cache
def _program(name: str) -> str:
  """Returns the modules and functions of a toy.

  Toys have equal sizes. Toys that differ only in numbers, dtypes and remat
  policies have the same text.
  """
  config = _toy(name)
  kind = fdl.get_callable(config.train_input).__name__
  lines = dump.to_text(config.task).splitlines()
  part = r".*: |.* = (paxon|jax)\.|.*(circular_repeats|streaming|num_kv_heads)"
  free = r"metrics|tokenizer|.*(policy|_init|\.cache|\.lookup|einsum)\b"
  kept = [x for x in lines if re.match(part, x) and not re.match(free, x)]
  return "\n".join([kind, *kept])


def _distinct(names: Sequence[str]) -> list[str]:
  """Returns the first experiment for each distinct toy program."""
  first: dict[str, str] = {}
  for name in names:
    first.setdefault(_program(name), name)
  return list(first.values())


_TOYS = _distinct(_NAMES)


def _covering(names: Sequence[str], done: Sequence[str]) -> list[str]:
  """Returns few experiments with all parts of `names` that `done` lack.

  A part counts as another one in a pipeline.
  """
  parts: dict[str, set[tuple[bool, str]]] = {}
  for name in (*names, *done):
    text = _program(name)
    parts[name] = {("pipeline" in text, x) for x in text.splitlines()}
  missing = set().union(*map(parts.__getitem__, names))
  missing -= set().union(*map(parts.__getitem__, done))
  chosen: list[str] = []
  while missing:
    chosen.append(max(names, key=lambda name: len(parts[name] & missing)))
    missing -= parts[chosen[-1]]
  return chosen


# What goes through all programs takes its steps there.
_STEPPED = _covering(_TOYS, _WHOLE)


def test_there_are_experiments():
  assert f"{_PARAMS}quickstart.PythonStdlibLm" in _NAMES
  assert f"{_PARAMS}lm_cloud.LmCloudSpmd1024B" in _NAMES
  assert f"{_PARAMS}nvidia.Grok" in _NAMES
  assert set(_WHOLE) <= set(_NAMES)
  # Base classes are not experiments.
  assert not [n for n in _NAMES if n.endswith(("Decoder", "LmSpmd", "Gpt3"))]


def test_help_describes_every_knob():
  missing = {
    f"{knob.owner}.{knob.name}"
    for name in _NAMES
    for cls in [type(golden.load(name))]
    for knob in cls.knobs().values()
    if knob.name not in knobs.describe(cls)
  }
  assert not missing, "add them to `Attributes` of the class's docstring"


@pytest.mark.parametrize("module", _MODULES)
def test_experiments_resolve_to_their_golden_file(module):
  path = golden.get_path(f"{module}.C")
  assert path.exists(), _MEND
  texts = {
    name.rpartition(".")[2]: golden.make_text(golden.resolve(name))
    for name in _NAMES
    if name.rpartition(".")[0] == module
  }
  found = golden.file_text(texts, module).splitlines()
  stored = path.read_text().splitlines()
  changes = difflib.unified_diff(stored, found, "stored", "found", n=0)
  assert not list(changes), _MEND


def test_every_golden_file_has_its_module():
  paths = {golden.get_path(name) for name in _NAMES}
  found = {p for path in paths for p in path.parent.glob("*.txt")}
  assert found == paths, "remove the file of a module that is gone"


@pytest.mark.parametrize("name", _NAMES)
def test_builds_and_its_mesh_fits_at_full_size(name):
  config = golden.resolve(name)
  job = fdl.build(config)
  shapes = job_lint.JobShapes(
    golden.get_specs(config), job.train_input.batch_shapes()
  )
  spec = meshes.MeshSpec.parse(job.mesh)
  sizes = [*spec.ici.values(), *spec.dcn.values()]
  findings = job_lint.check(
    job,
    num_devices=math.prod(size for size in sizes if size != -1),
    num_slices=math.prod(spec.dcn.values()),
    shapes=shapes,
  )
  assert not [found.message for found in findings if found.is_error]


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("name", _TOYS)
def test_shrinks_to_toy_size(name):
  """A knob missing in `shrink` leaves a model that takes minutes."""
  made, config = golden.load(name), _toy(name)
  total = golden.make_text(config).rpartition("trainable: ")[2]
  assert int(total.replace(",", "")) <= 100_000
  data = config.train_input
  assert data.global_batch_size * data.length <= 1024
  assert config.num_train_steps <= 2
  assert _text(made.replace(seed=made.seed + 1)) != _text(made)


@pytest.fixture(name="library", scope="module")
def _library(tmp_path_factory) -> pathlib.Path:
  """A folder with some of Python's library, of both splits."""
  folder = tmp_path_factory.mktemp("library")
  for split in ("train", "validation"):
    source = python_stdlib.PythonStdlib(split=split)
    for path in source.paths[:2]:
      shortened = folder / path
      shortened.parent.mkdir(parents=True, exist_ok=True)
      shortened.write_bytes((source.root / path).read_bytes()[:1000])
  return folder


def _toy_on(library: pathlib.Path, name: str) -> fdl.Config[job_lib.Job]:
  """Returns a toy that reads what there is of Python's library."""
  config = golden.load(name).shrink().job()
  for source in selectors.select(
    config, python_stdlib.PythonStdlib, check_nonempty=False
  ):
    source.folder = str(library)
  return config


def _batch(source: base_input.BaseInput) -> base_input.Batch:
  """Returns a batch; ones where an experiment's data is not on this machine."""
  if not isinstance(source, unset_input.UnsetInput):
    batch = source.get_next()
    if "rewards" in batch:
      # Answers in place of those of `runner.training.rollouts`.
      rewards = np.linspace(0, 1, batch["rewards"].size, dtype=np.float32)
      batch["rewards"] = rewards.reshape(batch["rewards"].shape)
      for name in ("weights", "is_token"):
        batch[name] = np.ones_like(batch[name])
    return batch
  return {k: np.ones(*made) for k, made in source.batch_shapes().items()}


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("name", _STEPPED)
def test_takes_two_steps_at_toy_size(name, library):
  config = _toy_on(library, name)
  specs = golden.get_specs(config)
  job = fdl.build(config)
  model, how = job.task.model, job.task.learner
  step = jax.jit(
    train_step.make_train_step(
      model_loss.make_loss_fn(model, specs=specs, deterministic=False),
      learner=how,
      specs=specs,
      seed=0,
    )
  )

  # Not compiled as a whole: toys share most of their shapes.
  values = initialization.initial_values(specs, 0)
  state = train_state.make_initial(values, learner=how, specs=specs)
  batch = _batch(job.train_input)
  first, _ = step(state, batch)
  after, metrics = step(first, batch)
  assert int(after.step) == 2
  assert np.isfinite(metrics["loss"][0])
  changed = jax.tree.map(
    lambda old, new: bool(np.any(np.asarray(old) != np.asarray(new))),
    state.variables["params"],
    after.variables["params"],
  )
  assert any(jax.tree.leaves(changed))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", _WHOLE)
def test_goes_through_all_programs_at_toy_size(name, library, tmp_path, capsys):
  config = _toy_on(library, name)
  run_dir = epath.Path(tmp_path)
  # All modes use the same experiment.
  train.run(fdl.build(config), config, run_dir)
  assert (run_dir / "checkpoints" / "2").exists()
  assert (run_dir / "report.html").exists()
  assert "bits_per_byte" in capsys.readouterr().out
  assert evaluate.run(fdl.build(config), run_dir) == 0
  assert "validation" in capsys.readouterr().out
  if config.generation is None:
    return
  assert decode.run(fdl.build(config), run_dir, None) == 0
  assert "--- sample 1 ---" in capsys.readouterr().out
