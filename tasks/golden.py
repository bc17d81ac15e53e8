"""Golden files: what an experiment resolves to, as text beside its module.

A golden file holds the resolved configuration, one value a line, and then each
variable's shape, axes and number of entries. So a review shows exactly which
hyper-parameter or shape a change has moved. After a wanted change:

  tools/python -m paxon.tasks.golden --update
"""

import argparse
from collections.abc import Iterator
import importlib.util
import math
import pathlib
import sys

import fiddle as fdl
import jax
import jax.numpy as jnp

from paxon.runner import experiment
from paxon.runner.configuration import (
  dump,
  experiment_index,
  find_experiment,
)
from paxon.runner.programs import model_loss
from paxon.sharding import variables

PACKAGE = "paxon.tasks"
_FOLDER = "goldens"

# Shapes of variables do not depend on the batch, so the smallest one will do.
_BATCH = {
  name: jax.ShapeDtypeStruct((1, 2), dtype)
  for name, dtype in {
    "inputs": jnp.int32,
    "targets": jnp.int32,
    "weights": jnp.float32,
    "positions": jnp.int32,
    "segment_ids": jnp.int32,
  }.items()
}


def text_of(made: experiment.Experiment) -> str:
  """Returns the contents of an experiment's golden file."""
  config = made.job()
  return "\n".join([dump.to_text(config), *_variables(config)]) + "\n"


def path_of(name: str) -> pathlib.Path:
  """Returns where the golden file of the experiment `a.b.C` lies."""
  module, _, class_name = name.rpartition(".")
  spec = importlib.util.find_spec(module)
  assert spec is not None
  assert spec.origin is not None
  stem = f"{module.rpartition('.')[2]}.{class_name}.txt"
  return pathlib.Path(spec.origin).parent / _FOLDER / stem


def names() -> list[str]:
  """Returns the import paths of all experiments."""
  return [entry.name for entry in experiment_index.list_experiments([PACKAGE])]


def load(name: str) -> experiment.Experiment:
  """Returns the experiment `a.b.C` with its own knobs."""
  return find_experiment.find_experiment(name)()


def update() -> list[pathlib.Path]:
  """Writes all golden files; returns those that changed or are new."""
  changed = []
  for name in names():
    path, text = path_of(name), text_of(load(name))
    if not path.exists() or path.read_text() != text:
      path.parent.mkdir(exist_ok=True)
      path.write_text(text)
      changed.append(path)
  return changed


def _variables(config: fdl.Buildable) -> Iterator[str]:
  model = fdl.build(config.task.model)
  specs = variables.specs_of(model_loss.abstract_variables(model, _BATCH))
  leaves = jax.tree.leaves(specs)
  for spec in leaves:
    names = ", ".join(str(axis) for axis in spec.axes)
    decay = " decayed" if spec.regularized else ""
    yield f"{spec.name}: {spec.dtype}{list(spec.shape)} ({names}){decay}"
  total = sum(math.prod(spec.shape) for spec in leaves if spec.trainable)
  yield f"trainable: {total:,}"


def main(argv: list[str]) -> int:
  """Updates the golden files, or says which differ; returns the exit status."""
  parser = argparse.ArgumentParser(description="Golden files of experiments.")
  parser.add_argument("--update", action="store_true", help="write them")
  if parser.parse_args(argv).update:
    for path in update():
      print(f"written: {path}")
    return 0
  differing = [
    name
    for name in names()
    if not path_of(name).exists()
    or path_of(name).read_text() != text_of(load(name))
  ]
  for name in differing:
    print(f"differs from its golden file: {name}")
  if differing:
    print("where this is wanted: tools/python -m paxon.tasks.golden --update")
  return 1 if differing else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
