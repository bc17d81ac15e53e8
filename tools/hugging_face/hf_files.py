"""Files of Hugging Face models other than weights, and imported checkpoints."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import functools
import json
import os
import re
import tempfile
from typing import Any

from etils import epath
import numpy as np

from paxon.inputs.tokenizers import load, text_tokenizer
from paxon.layers.models.hugging_face import family, sentence_modules
from paxon.layers.models.hugging_face.files import weight_files
from paxon.runner import files, user_error
from paxon.runner.checkpoints import checkpointer, lazy_array
from paxon.sharding import variables

CONFIG = "config.json"
GENERATION = "generation_config.json"
# Folder of these files in an imported run directory.
FOLDER = "hugging_face"
_BESIDE = """
  added_tokens.json chat_template.jinja chat_template.json
  generation_config.json merges.txt preprocessor_config.json
  special_tokens_map.json tokenizer_config.json vocab.json vocab.txt
  """
_BESIDE_SENTENCES = (
  sentence_modules.MODULES,
  sentence_modules.PROMPTS,
  *sentence_modules.SETTINGS,
)

# In that folder: the weights that the model does not use, and where the model
# was imported from.
UNUSED = "unused.safetensors"
SOURCE = "source.json"
_HUB = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+")
# Suffixes of files with weights, texts and settings.
_TEXTS = (".json", ".jinja", ".txt")
_ENDINGS = (*_TEXTS, ".safetensors")

# Settings of generation without effect here, with the values that have none in
# transformers either.
_IGNORED_GENERATION: Mapping[str, Any] = {
  "bad_words_ids": [],
  "begin_suppress_tokens": [],
  "diversity_penalty": 0.0,
  "encoder_repetition_penalty": 1.0,
  "eta_cutoff": 0.0,
  "forced_bos_token_id": None,
  "forced_eos_token_id": None,
  "guidance_scale": 1.0,
  "min_length": 0,
  "no_repeat_ngram_size": 0,
  "penalty_alpha": 0.0,
  "sequence_bias": {},
  "stop_strings": [],
  "suppress_tokens": [],
}


def read_config(folder: epath.Path) -> Mapping[str, Any]:
  """Returns the content of `config.json`.

  Raises:
    user_error.UserError: The file is missing or invalid.
  """
  path = folder / CONFIG
  try:
    config = json.loads(files.read_text(path))
  except FileNotFoundError as error:
    raise user_error.UserError(
      f"{os.fspath(path)} is missing; it describes the model."
    ) from error
  except files.DamagedFileError:
    raise
  except (OSError, ValueError, RecursionError) as error:
    raise user_error.UserError(
      f"{os.fspath(path)} cannot be read ({error})."
    ) from error
  if not isinstance(config, dict):
    raise user_error.UserError(f"{os.fspath(path)} is not a JSON object.")
  return config


def check_links(folder: epath.Path) -> None:
  """Raises DamagedFileError if a file to read is not a file of the folder."""
  files.check_links(folder, (*_ENDINGS, *load.ENDINGS))


@contextlib.contextmanager
def mirror(folder: epath.Path) -> Iterator[epath.Path]:
  """Yields a local folder with the files of a folder other than weights.

  A local folder is yielded itself; files of a store are copied for a while.
  """
  if files.is_local(folder):
    yield folder
    return
  with tempfile.TemporaryDirectory() as local:
    _copy_files(folder, epath.Path(local), inside=False)
    yield epath.Path(local)


def _copy_files(folder: epath.Path, local: epath.Path, *, inside: bool) -> None:
  for each in folder.iterdir():
    target = local / each.name
    if each.is_dir():
      if not inside:  # Modules of sentence-transformers.
        target.mkdir()
        _copy_files(each, target, inside=True)
    elif (
      each.name.endswith((*_TEXTS, *load.ENDINGS))
      or each.name in load.NAMES
      or (inside and each.name == weight_files.WEIGHTS)
    ):
      target.write_bytes(each.read_bytes())


def copy_beside(
  source: epath.Path,
  target: epath.Path,
  *,
  dtype: str | None = None,
  config: Mapping[str, Any] | None = None,
) -> list[str]:
  """Copies `config.json`, and files of tokenizers and images; returns names.

  Args:
    source: The folder that holds them.
    target: Created if missing.
    dtype: Dtype of the weights, for `config.json`; None keeps what it says.
    config: Content of `config.json`; None for that of the source.
  """
  check_links(source)
  target.mkdir(parents=True, exist_ok=True)
  names = sorted(
    str(each.name)
    for each in source.iterdir()
    if each.name in (*_BESIDE.split(), *_BESIDE_SENTENCES, *load.NAMES, CONFIG)
    or each.name.endswith(load.ENDINGS)
  )
  try:
    folders = sentence_modules.find_folders(source)
  except family.UnsupportedConfigError as error:
    raise user_error.UserError(str(error)) from error
  for folder in folders:
    check_links(source / folder)
    (target / folder).mkdir(exist_ok=True)
    inside = (CONFIG, weight_files.WEIGHTS)
    names += [f"{folder}/{x}" for x in inside if (source / folder / x).exists()]
  for name in names:
    (source / name).copy(target / name, overwrite=True)
  stored = read_config(source)
  config = dict(stored if config is None else config)
  # Quantized weights are imported as their values.
  config.pop("quantization_config", None)
  # The older name, if the file has it.
  name = "torch_dtype" if "torch_dtype" in config else "dtype"
  if dtype is not None:
    config[name] = dtype
  if config != stored:
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (target / CONFIG).write_text(text + "\n")
  return names


def write_source(folder: epath.Path, source: epath.Path) -> None:
  """Stores where a model is imported from: a name of the Hub, or a path.

  Args:
    folder: `FOLDER` of the imported run.
    source: The imported folder; one in the cache of the Hub has a name.
  """
  path = os.fspath(source)
  path = os.path.abspath(path) if files.is_local(path) else path
  hub = _HUB.search(path)
  name = f"{hub[1]}/{hub[2]}" if hub else path
  (folder / SOURCE).write_text(json.dumps({"source": name}) + "\n")


def read_source(folder: epath.Path) -> str | None:
  """Returns the name that `write_source` or `config.json` stored."""
  path = folder / SOURCE
  try:
    found = json.loads(path.read_text()) if path.exists() else {}
    name = found.get("source")
  except (OSError, ValueError, AttributeError) as error:
    raise user_error.UserError(
      f"{os.fspath(path)} is damaged: {error}."
    ) from error
  return name or read_config(folder).get("_name_or_path") or None


def find_ignored_generation(folder: epath.Path) -> list[str]:
  """Returns settings of generation that change texts, and are not supported.

  Raises:
    user_error.UserError: The file is not a JSON object.
  """
  try:
    found = text_tokenizer.read_json(os.fspath(folder), GENERATION)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  ignored = [
    f"{name}={found[name]!r}"
    for name, neutral in _IGNORED_GENERATION.items()
    if found.get(name) not in (None, neutral)
  ]
  beams = found.get("num_beams") or 1
  if beams > 1 and found.get("do_sample"):
    ignored.append(f"num_beams={beams} with do_sample")
  elif beams > 1 and found.get("repetition_penalty", 1.0) != 1.0:
    ignored.append(f"repetition_penalty={found['repetition_penalty']} of beams")
  return ignored


def find_dtype(dtypes: Iterable[Any]) -> str | None:
  """Returns the name of the dtype of all weights; None if they have several."""
  found = {np.dtype(each).name for each in dtypes}
  return found.pop() if len(found) == 1 else None


def save_imported(
  checkpoints: epath.Path,
  specs: Mapping[str, variables.VariableSpec],
  read: Callable[[str], np.ndarray],
) -> None:
  """Writes a checkpoint of step 0, one array at a time.

  Args:
    checkpoints: The directory of the new run's checkpoints.
    specs: Specs of the variables, by name.
    read: Returns the values of a variable.

  Raises:
    user_error.UserError: It cannot be written, or what is read is damaged.
  """
  step = variables.VariableSpec("step", (), np.dtype(np.int32), ())
  all_specs = {**specs, step.name: step}
  tree = {
    name: lazy_array.LazyArray(
      shape=spec.shape, dtype=spec.dtype, read=functools.partial(read, name)
    )
    for name, spec in specs.items()
  }
  # Training starts here at step 0.
  tree[step.name] = lazy_array.LazyArray(
    shape=(), dtype=step.dtype, read=lambda: np.zeros((), np.int32)
  )
  try:
    with checkpointer.Checkpointer(checkpoints, lazy=True) as opened:
      opened.save(0, tree, specs=all_specs, data={})
  except checkpointer.SaveError as error:
    raise user_error.UserError(str(error)) from error
