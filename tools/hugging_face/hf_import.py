"""Import of Hugging Face weights into a checkpoint.

Arrays are converted one at a time, each with all layers of a stack, and written
before the next is read: peak memory is a few times the largest array.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import os
from typing import Any

from etils import epath
import jax
import numpy as np

from paxon.inputs.tokenizers import load
from paxon.layers.models.hugging_face import families, family, mapping
from paxon.layers.models.hugging_face.files import (
  safetensors_file,
  weight_files,
)
from paxon.runner import files as runner_files
from paxon.runner import run_dir, units, user_error
from paxon.runner.checkpoints import text_table
from paxon.runner.configuration import overrides
from paxon.runner.session import run_files
from paxon.sharding import variables
from paxon.tools.hugging_face import hf_files

# Rows of a head that are compared at a time.
_ROWS = 1024
# Ignored tensors that are printed.
_MAX_UNUSED = 4
# The experiments of imported models, by the ends of their architectures' names;
# tools do not depend on them.
_EXPERIMENTS = {
  "ForCausalLM": ".HuggingFaceLm",
  "LMHeadModel": ".HuggingFaceLm",
  "BertForMaskedLM": ".HuggingFaceBert",
  "BertForPreTraining": ".HuggingFaceBert",
  "BertForSequenceClassification": "_texts.HuggingFaceClassifier",
  "BertModel": "_texts.HuggingFaceEmbeddings",
  "T5ForConditionalGeneration": ".HuggingFaceT5",
}
_MODULE = "paxon.tasks.lm.params.hugging_face"
_MISTAKES = (
  family.UnsupportedConfigError,
  safetensors_file.DamagedFileError,
  weight_files.WeightsError,
)


def find_experiment(architecture: str) -> str | None:
  """Returns the experiment that trains and evaluates an imported model.

  `None` if there is none, as for images and speech.
  """
  for ending, name in _EXPERIMENTS.items():
    if architecture.endswith(ending):
      return f"{_MODULE}{name}"
  return None


def _keep_unused(files: weight_files.WeightFiles, folder: epath.Path) -> None:
  """Writes the weights that only the export needs."""
  kept = {
    name: stored
    for name, stored in files.entries.items()
    if files.names.is_kept(name)
  }
  if not kept:
    return
  described = {
    name: (entry.numpy_dtype, entry.shape) for name, (_, entry) in kept.items()
  }
  path = folder / hf_files.UNUSED
  with safetensors_file.Writer(path, described) as writer:
    for name, (source, entry) in kept.items():
      if name in files.quantized:
        rows = files.read_rows(name, 0, entry.shape[0])
      else:
        rows = safetensors_file.read_rows(source, entry, 0, entry.shape[0])
      writer.write_rows(name, 0, rows)


def run(
  source: epath.Path, target: epath.Path, *, dtype: Any, dry_run: bool
) -> Iterator[str]:
  """Imports weights, and yields lines to print.

  Args:
    source: A folder with `config.json` and weights, or one file next to
      `config.json`.
    target: The run directory to make: `checkpoints/0`, and `hugging_face` with
      the files for exporting.
    dtype: Of the stored arrays; None keeps that of the files.
    dry_run: Only print what would be written.

  Raises:
    user_error.UserError: The model is not supported, or the weights do not
      match it.
  """
  folder = _check_places(source, target, dry_run)
  with hf_files.mirror(folder) as local:
    yield from _run(source, folder, local, target, dtype, dry_run)


def _run(
  source: epath.Path,
  folder: epath.Path,
  local: epath.Path,
  target: epath.Path,
  dtype: Any,
  dry_run: bool,
) -> Iterator[str]:
  """Imports weights; `local` has the other files of their folder."""
  given: Mapping[str, Any] = hf_files.read_config(local)
  try:
    model = _find_model(source, given, dtype)
  except _MISTAKES as error:
    raise user_error.UserError(str(error)) from error
  specs = _specs(model.family, model.config, model.files.names, model.dtypes)
  yield from _describe_quantization(model.files)
  if dry_run:
    yield from preview(model.files, model.dtypes)
  else:
    yield from _describe_model(model, given)
    yield from _write(model, specs, local, target)
    hf_files.write_source(target / hf_files.FOLDER, folder)
  names = model.files.names
  total = sum(
    model.dtypes[name].itemsize * int(np.prod(leaf.shape))
    for name, leaf in names.leaves.items()
  )
  done = "would write" if dry_run else "wrote"
  yield (
    f"{done} {len(names.leaves)} arrays, {units.size(total)}, to"
    f" {os.fspath(target / run_dir.CHECKPOINTS / '0')}"
  )


@dataclasses.dataclass(frozen=True)
class _Model:
  """A model in files, as it is imported.

  Attributes:
    family: Its family.
    config: Its configuration, that of the language model of a larger one.
    files: Its weights, checked.
    dtypes: Of the stored arrays, by logical name.
    is_part: Whether it is the language model of a larger one.
    lacks_layers: Whether the files have no weights of the family's
      `further_layers`.
  """

  family: family.Family
  config: Mapping[str, Any]
  files: weight_files.WeightFiles
  dtypes: Mapping[str, np.dtype]
  is_part: bool
  lacks_layers: bool


def _check_places(
  source: epath.Path, target: epath.Path, dry_run: bool
) -> epath.Path:
  """Returns the folder of the source; raises if the target is not free."""
  for place in (source, target):
    runner_files.check_store(place)
  folder = source if source.is_dir() else source.parent
  if not source.exists():
    raise user_error.UserError(
      f"{os.fspath(source)} does not exist; pass a folder with config.json and"
      " safetensors files."
    )
  hf_files.check_links(folder)
  checkpoints = target / run_dir.CHECKPOINTS
  if not dry_run and checkpoints.is_dir():
    there = [each.name for each in checkpoints.iterdir()]
    # Remains of an interrupted import are replaced.
    if any(name.isdecimal() for name in there):
      raise user_error.UserError(
        f"{os.fspath(checkpoints)} holds checkpoints; pass another folder, or"
        " delete them."
      )
  return folder


def _find_model(
  source: epath.Path, given: Mapping[str, Any], dtype: Any
) -> _Model:
  """Finds the family and the weights of a configuration, or raises."""
  found = families.find(given)
  config: Mapping[str, Any] = families.to_language_model(given)
  is_part = config is not given
  files = weight_files.find(source, names=found.names(config), dtype=dtype)
  if is_part and _has_own_head(files):
    # transformers ties heads only if the file has none, or the same.
    config = {**config, "tie_word_embeddings": False}
    files = weight_files.find(source, names=found.names(config), dtype=dtype)
  lacks_layers = _absent_layers(found, config, files)
  if lacks_layers:
    config = dict(config) | {found.further_layers: 0}
    files = weight_files.find(source, names=found.names(config), dtype=dtype)
  files.check()
  dtypes = {
    name: np.dtype(dtype or files.leaf_dtype(leaf))
    for name, leaf in files.names.leaves.items()
  }
  return _Model(found, config, files, dtypes, is_part, lacks_layers)


def _describe_model(model: _Model, given: Mapping[str, Any]) -> Iterator[str]:
  """Yields the parts of the files and of `config.json` that are used."""
  files, found = model.files, model.family
  yield f"{found.model_type}: {len(files.names.tensors)} tensors"
  if model.lacks_layers:
    yield f"{found.further_layers}: imported without, as no file has weights"
  if ignored := found.find_ignored(model.config):
    yield (
      "config.json: ignored, as the class of transformers does not have them:"
      f" {', '.join(ignored)}"
    )
  unused = files.find_unused()
  if model.is_part:
    yield _describe_part(given, found, unused)
  elif unused:
    yield f"not used by the model: {', '.join(unused[:_MAX_UNUSED])}" + (
      f" and {len(unused) - _MAX_UNUSED} more"
      if len(unused) > _MAX_UNUSED
      else ""
    )


def _write(
  model: _Model,
  specs: Mapping[str, variables.VariableSpec],
  folder: epath.Path,
  target: epath.Path,
) -> Iterator[str]:
  """Writes the checkpoint and the files for exporting, and yields lines."""
  names = model.files.names

  def read(name: str) -> np.ndarray:
    leaf = names.leaves[name]
    return leaf.from_tensors(model.files.read_rows, specs[name].dtype)

  hf_files.save_imported(target / run_dir.CHECKPOINTS, specs, read)
  copied = hf_files.copy_beside(
    folder,
    target / hf_files.FOLDER,
    dtype=hf_files.find_dtype(model.dtypes.values()),
    config=model.config,
  )
  _keep_unused(model.files, target / hf_files.FOLDER)
  yield f"copied: {', '.join(copied)}"
  yield from _describe_vocabulary(folder, model.config)
  if _reads_text(model.family, model.config) and not _has_tokenizer(folder):
    yield (
      f"warning: {os.fspath(folder)} has no tokenizer file"
      f" ({', '.join(load.NAMES)}); text can be read and generated only with"
      " --fdl.tokenizer=PATH"
    )
  if ignored := hf_files.find_ignored_generation(folder):
    yield (
      f"warning: {hf_files.GENERATION}: {', '.join(ignored)} not supported;"
      " text is generated without"
    )
  found = (model.config.get("architectures") or [model.family.architecture])[0]
  if experiment := find_experiment(found):
    # So that --job_log_dir is enough to decode and evaluate.
    override = overrides.parse_argument(f"--fdl.weights={run_dir.HERE}")
    assert override is not None
    run_files.store_settings(experiment, (override,), target)


def _describe_quantization(
  files: weight_files.WeightFiles,
) -> Iterator[str]:
  """Yields a line if the files have quantized weights."""
  weights = list(files.quantized.values())
  if weights:
    forms = sorted({each.storage.form.value for each in weights})
    dtypes = sorted({each.dtype.name for each in weights})
    yield (
      f"dequantized: {len(weights)} tensors in {', '.join(forms)} to"
      f" {', '.join(dtypes)}; activations are not quantized"
    )


def _has_own_head(files: weight_files.WeightFiles) -> bool:
  """Whether files have a head that differs from the embedding it is tied to."""
  for name, table in files.names.tied.items():
    if {name, table} <= files.entries.keys():
      shapes = [files.entry(each).shape for each in (name, table)]
      if shapes[0] != shapes[1]:
        return True
      for start in range(0, shapes[0][0], _ROWS):
        stop = min(start + _ROWS, shapes[0][0])
        head = files.read_rows(name, start, stop)
        if not np.array_equal(head, files.read_rows(table, start, stop)):
          return True
  return False


def _describe_part(
  given: Mapping[str, Any], of: family.Family, unused: Sequence[str]
) -> str:
  """Returns the line about the language model of a larger model."""
  line = (
    f"{given['model_type']}: imported the language model, which is exported as"
    f" {of.architecture}"
  )
  parts = {name.removeprefix("model.").partition(".")[0] for name in unused}
  if parts:
    line += f"; left out {', '.join(sorted(parts))} ({len(unused)} tensors)"
  return line


def _reads_text(of: family.Family, config: Mapping[str, Any]) -> bool:
  """Whether the model has ids as inputs, not only images."""
  args = jax.tree.leaves(of.example(config))
  return any(np.issubdtype(each.dtype, np.integer) for each in args)


def _has_tokenizer(folder: epath.Path) -> bool:
  try:
    load.find(os.fspath(folder))
  except ValueError:
    return False
  return True


def _describe_vocabulary(
  folder: epath.Path, config: Mapping[str, Any]
) -> Iterator[str]:
  """Yields a line if the tokenizer has more ids than the model embeds."""
  size = config.get("vocab_size")
  if not isinstance(size, int) or not _has_tokenizer(folder):
    return
  try:
    found = load.load(os.fspath(folder)).vocab_size
  except (OSError, ValueError, ImportError) as error:
    yield f"warning: the tokenizer cannot be read ({error})"
    return
  if found > size:
    yield (
      f"the tokenizer has {found:,} ids, the embedding {size:,}: texts with ids"
      f" from {size:,} are rejected where they occur"
    )


def preview(
  files: weight_files.WeightFiles, dtypes: Mapping[str, np.dtype]
) -> Iterator[str]:
  """Yields a table of names and shapes."""
  rows = [("array", "shape", "dtype", "from", "shape", "dtype")]
  for name, leaf in files.names.leaves.items():
    tensor = leaf.sources[0][0].name
    more = len(leaf.sources) - 1
    entry = files.entry(tensor)
    rows.append(
      (
        name,
        _shape(leaf.shape),
        dtypes[name].name,
        f"{tensor}{f' and {more} more' if more else ''}",
        _shape(entry.shape),
        entry.numpy_dtype.name,
      )
    )
  yield from text_table.format_lines(rows, right=())


def _absent_layers(
  of: family.Family,
  config: Mapping[str, Any],
  files: weight_files.WeightFiles,
) -> bool:
  """Whether the files lack all of the family's further layers."""
  if not of.further_layers or not config.get(of.further_layers):
    return False
  first = f"layers.{config['num_hidden_layers']}."
  return not any(first in name for name in files.entries)


def _specs(
  of: family.Family,
  config: Mapping[str, Any],
  names: mapping.Names,
  dtypes: Mapping[str, np.dtype],
) -> dict[str, variables.VariableSpec]:
  """Returns the specs of the model, by name, with the dtypes of the files."""
  abstract = jax.eval_shape(
    of.model(config).init, jax.random.key(0), *of.example(config)
  )
  found = jax.tree.leaves(variables.get_specs(abstract))
  shapes = {spec.name: spec.shape for spec in found}
  expected = {name: leaf.shape for name, leaf in names.leaves.items()}
  assert shapes == expected, "a family's names differ from its model's"
  return {
    spec.name: variables.VariableSpec(
      name=spec.name,
      shape=spec.shape,
      dtype=dtypes[spec.name],
      axes=spec.axes,
    )
    for spec in found
  }


def _shape(shape: tuple[int, ...]) -> str:
  return f"[{', '.join(map(str, shape))}]"
