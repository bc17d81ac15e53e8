"""Distributions of parts: the files and requirements that Python needs."""

import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

from paxon.tools import part_wheel
from paxon.tools.dependencies import workspace

_ROOT = workspace.find_root(pathlib.Path(__file__))


@pytest.fixture(name="sources", scope="module")
def _sources(tmp_path_factory):
  folder = tmp_path_factory.mktemp("sources")
  part_wheel.write_sources(_ROOT, "paxon-plan", folder)
  return folder


def _run(code, sources):
  environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONSAFEPATH="1")
  # The distribution before everything else that is named paxon.
  path = [str(sources), *(each for each in sys.path if each)]
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=environment | {"PYTHONPATH": os.pathsep.join(path)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_functions_are_planned_with_the_files_of_the_distribution(sources):
  code = (
    "import sys, jax, paxon\n"
    "from paxon.runner.plan.functions import plan_main\n"
    "x = jax.ShapeDtypeStruct((4, 8), 'float32')\n"
    "assert paxon.plan(lambda x: x + 1, x, target='cpu:1').compiled\n"
    "print(*{m.__file__ for n, m in sys.modules.items()"
    " if n.split('.')[0] == 'paxon'})\n"
  )
  loaded = {
    str(pathlib.Path(path).relative_to(sources / "paxon"))
    for path in _run(code, sources).split()
  }
  files = {
    str(path.relative_to(sources / "paxon"))
    for path in sources.rglob("*.py")
    # Of `paxon-plan` itself, and of the process that compiles.
    if path.name not in ("console_scripts.py", "worker.py")
    and path.parent.name != "tools"
  }
  assert files == loaded


def test_metadata_have_all_that_is_imported_and_no_more(sources):
  project = tomllib.loads((sources / "pyproject.toml").read_text())["project"]
  names = {line.split(">")[0] for line in project["dependencies"]}
  # jax.export needs flatbuffers without requiring it.
  assert names == {"jax", "jaxtyping", "numpy", "flatbuffers"}
  assert set(project["optional-dependencies"]) == {"cuda", "cudnn", "tpu"}
  assert "nvidia-cuda-nvcc" in project["optional-dependencies"]["cuda"]
  version = _run("import paxon; print(paxon.__version__)", sources)
  assert project["version"] == version.strip()
  assert list(project["scripts"]) == ["paxon-plan"]


def test_packages_are_listed(sources):
  content = tomllib.loads((sources / "pyproject.toml").read_text())
  packages = content["tool"]["setuptools"]["packages"]
  assert packages[0] == "paxon"
  for path in sources.rglob("*.py"):
    assert ".".join(path.relative_to(sources).parent.parts) in packages


@pytest.fixture(name="layers", scope="module")
def _layers(tmp_path_factory):
  folder = tmp_path_factory.mktemp("layers")
  part_wheel.write_sources(_ROOT, "paxon-layers", folder)
  return folder


def test_a_layer_and_an_optimizer_run_from_the_distribution(layers):
  code = (
    "import sys, jax, optax, paxon\n"
    "from flax import linen as nn\n"
    "from paxon.layers import feed_forward\n"
    "from paxon.learners.optimizers import adamw\n"
    "layer = feed_forward.GatedFeedForward(mlp_dim=8)\n"
    "x = jax.numpy.ones((1, 2, 4))\n"
    "params = nn.unbox(layer.init(jax.random.key(0), x))\n"
    "loss = lambda p: (layer.apply(p, x) ** 2).mean()\n"
    "optimizer = adamw.AdamW(schedule=lambda step: 1e-2).transform()\n"
    "gradients = jax.grad(loss)(params)\n"
    "state = optimizer.init(params)\n"
    "updates, _ = optimizer.update(gradients, state, params)\n"
    "assert loss(optax.apply_updates(params, updates)) < loss(params)\n"
    "names = {name.partition('.')[0] for name in sys.modules}\n"
    "print(paxon.__file__)\n"
    "assert not names & {'orbax', 'fiddle', 'tensorboardX'}, names\n"
  )
  # Flax itself loads rich.
  assert pathlib.Path(_run(code, layers).strip()).is_relative_to(layers)


def test_layers_require_neither_the_trainer_nor_its_libraries(layers):
  project = tomllib.loads((layers / "pyproject.toml").read_text())["project"]
  names = {line.split(">")[0] for line in project["dependencies"]}
  assert names == {"flax", "jax", "jaxtyping", "numpy", "optax"}
  folders = {path.name for path in (layers / "paxon").iterdir()}
  folders.discard("__pycache__")  # Of the program of another test.
  parts = {"layers", "learners", "pipeline", "quantization", "sharding"}
  assert folders == parts | {"LICENSE", "__init__.py", "py.typed"}
  assert project["scripts"] == {}
