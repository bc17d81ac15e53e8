"""Golden files: resolved configurations of experiments, as text.

There is one file per module. An experiment's text is its resolved
configuration, one value per line, then the dtype, shape and axes of each
variable. The first of a family is written in full, others as a diff to their
base class or to the most similar experiment:

  == LmCloudSpmd2BLimitSteps, as LmCloudSpmd2B
  - num_train_steps = 300000
  + num_train_steps = 300

In a review, the diff shows which hyper-parameters and shapes changed. After an
intended change:

  tools/python -m paxon.tasks.golden --update
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import functools
import importlib.util
import math
import pathlib
import sys

import fiddle as fdl
import jax
import numpy as np

from paxon.inputs.tokenizers import encoder_texts
from paxon.runner import experiment, job
from paxon.runner.configuration import dump, find_experiment, tree
from paxon.runner.session import model_loss
from paxon.sharding import variables

PACKAGES = (
  "paxon.tasks.lm.params",
  "paxon.tasks.speech.params",
  "paxon.tasks.vision.params",
)
_FOLDER = "goldens"
# Of inputs of images and of speech.
_SHAPES = ("image_shape", "sample_rate", "max_seconds")
BEGIN = "== "
AS = ", as "


def names() -> list[str]:
  """Returns the import paths of all experiments."""
  return [entry.name for entry in find_experiment.list_experiments(PACKAGES)]


def load(name: str) -> experiment.Experiment:
  """Returns the experiment `a.b.C` with its default knobs."""
  return find_experiment.find_experiment(name)()


@functools.cache
def resolve(name: str) -> fdl.Config[job.Job]:
  """Returns the resolved configuration of an experiment.

  It is cached: do not modify it.
  """
  return load(name).job()


def get_specs(config: fdl.Buildable) -> variables.Specs:
  """Returns the specs of a job's variables; caches equal models."""
  model = dump.to_text(config.task.model)
  return _specs(_Model(model, config))


def make_text(config: fdl.Config[job.Job]) -> str:
  """Returns the full golden text of a resolved configuration."""
  lines = [dump.to_text(config).rstrip("\n"), *_variables(config)]
  return "\n".join(lines) + "\n"


def get_path(name: str) -> pathlib.Path:
  """Returns the path of the golden file of the experiment `a.b.C`."""
  module = name.rpartition(".")[0]
  spec = importlib.util.find_spec(module)
  assert spec is not None
  assert spec.origin is not None
  stem = f"{module.rpartition('.')[2]}.txt"
  return pathlib.Path(spec.origin).parent / _FOLDER / stem


def file_text(texts: Mapping[str, str], module: str) -> str:
  """Returns the golden file of a module."""
  parts, written = [], []
  for name in _bases_first(texts, module):
    above = [b for b in _bases(module, name) if b in written]
    base = _closest(texts, name, above[:1]) or _closest(texts, name, written)
    if base is None:
      parts.append(f"{BEGIN}{name}\n{texts[name]}")
    else:
      change = "".join(_change(texts[base], texts[name]))
      parts.append(f"{BEGIN}{name}{AS}{base}\n{change}")
    written.append(name)
  return "\n".join(parts)


def update() -> list[pathlib.Path]:
  """Writes all golden files; returns the changed and new ones."""
  changed = []
  for path, text in _files().items():
    if not path.exists() or path.read_text() != text:
      path.parent.mkdir(exist_ok=True)
      path.write_text(text)
      changed.append(path)
  return changed


def _files() -> dict[pathlib.Path, str]:
  by_module: dict[str, dict[str, str]] = {}
  for name in names():
    module, _, class_name = name.rpartition(".")
    by_module.setdefault(module, {})[class_name] = make_text(resolve(name))
  return {
    get_path(f"{module}.C"): file_text(texts, module)
    for module, texts in by_module.items()
  }


def _bases(module: str, class_name: str) -> list[str]:
  """Returns the base classes of a class in its module, nearest first."""
  cls = type(load(f"{module}.{class_name}"))
  return [b.__name__ for b in cls.__mro__[1:] if b.__module__ == module]


def _bases_first(names: Mapping[str, str], module: str) -> list[str]:
  return sorted(names, key=lambda n: (len(_bases(module, n)), n))


def _closest(
  texts: Mapping[str, str], name: str, others: Sequence[str]
) -> str | None:
  """Returns the most similar experiment, if half of the lines are equal."""
  sizes = {o: sum(1 for _ in _change(texts[o], texts[name])) for o in others}
  best = min(others, key=sizes.__getitem__, default=None)
  is_close = best is not None and sizes[best] < texts[name].count("\n") // 2
  return best if is_close else None


def _change(old: str, new: str) -> Iterator[str]:
  """Yields removed and added lines."""
  before, after = old.splitlines(), new.splitlines()
  for sign, lines, others in (("-", before, after), ("+", after, before)):
    known = set(others)
    yield from (f"{sign} {line}\n" for line in lines if line not in known)


class _Model:
  """A model and the shape of an example, compared by their text."""

  def __init__(self, text: str, config: fdl.Buildable) -> None:
    self.config = config
    source = config.train_input
    shapes = (tree.find_value(source, name) for name in _SHAPES)
    self.key = text, source.length, *shapes

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Model) and self.key == other.key

  def __hash__(self) -> int:
    return hash(self.key)


@functools.lru_cache(maxsize=256)
def _specs(model: _Model) -> variables.Specs:
  # Shapes of variables do not depend on the batch size.
  source = model.config.train_input
  if tree.find_value(source, "image_shape") is not None:
    batch = _images(source.image_shape)
  elif tree.find_value(source, "sample_rate") is not None:
    batch = _speech(round(source.max_seconds * source.sample_rate))
  else:
    batch = _text(model)
  if _has_whole_texts(source):
    batch["type_ids"] = batch["inputs"]
    batch["labels"] = jax.ShapeDtypeStruct((1,), np.int32)
    batch["example_weights"] = jax.ShapeDtypeStruct((1,), np.float32)
  built = fdl.build(model.config.task.model)
  return variables.get_specs(model_loss.abstract_variables(built, batch))


def _has_whole_texts(source: fdl.Buildable) -> bool:
  examples = tree.find_value(tree.find_value(source, "examples"), "source")
  kinds = encoder_texts.UnsetTexts, encoder_texts.EncoderTexts
  made = (
    each for each in (source, examples) if isinstance(each, fdl.Buildable)
  )
  return any(fdl.get_callable(each) in kinds for each in made)


def _images(shape: Sequence[int]) -> dict[str, jax.ShapeDtypeStruct]:
  return {
    "images": jax.ShapeDtypeStruct((1, *shape), np.float32),
    "labels": jax.ShapeDtypeStruct((1,), np.int32),
    "example_weights": jax.ShapeDtypeStruct((1,), np.float32),
  }


def _speech(num_samples: int) -> dict[str, jax.ShapeDtypeStruct]:
  return {
    "audio": jax.ShapeDtypeStruct((1, num_samples), np.float32),
    "audio_lengths": jax.ShapeDtypeStruct((1,), np.int32),
    "labels": jax.ShapeDtypeStruct((1, 1), np.int32),
    "label_lengths": jax.ShapeDtypeStruct((1,), np.int32),
    "example_weights": jax.ShapeDtypeStruct((1,), np.float32),
  }


def _text(model: _Model) -> dict[str, jax.ShapeDtypeStruct]:
  shape = 1, model.config.train_input.length
  keys = ("inputs", "targets", "positions", "segment_ids")
  batch = {key: jax.ShapeDtypeStruct(shape, np.int32) for key in keys}
  batch["weights"] = jax.ShapeDtypeStruct(shape, np.float32)
  encoder_length = tree.find_value(model.config.train_input, "encoder_length")
  if encoder_length is not None:
    for key in ("inputs", "positions", "segment_ids"):
      source = jax.ShapeDtypeStruct((1, encoder_length), np.int32)
      batch[f"encoder_{key}"] = source
  return batch


def _variables(config: fdl.Buildable) -> Iterator[str]:
  leaves = jax.tree.leaves(get_specs(config))
  for spec in leaves:
    names = ", ".join(str(axis) for axis in spec.axes)
    decay = " decayed" if spec.regularized else ""
    yield f"{spec.name}: {spec.dtype}{list(spec.shape)} ({names}){decay}"
  total = sum(math.prod(spec.shape) for spec in leaves if spec.trainable)
  yield f"trainable: {total:,}"


def main(argv: list[str]) -> int:
  """Compares or updates the golden files; returns the exit status."""
  parser = argparse.ArgumentParser(description="Golden files of experiments.")
  parser.add_argument("--update", action="store_true", help="write them")
  if parser.parse_args(argv).update:
    for path in update():
      print(f"written: {path}")
    return 0
  differing = [
    path
    for path, text in _files().items()
    if not path.exists() or path.read_text() != text
  ]
  for path in differing:
    print(f"differs from what its experiments are: {path}")
  if differing:
    print("where this is wanted: tools/python -m paxon.tasks.golden --update")
  return 1 if differing else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
