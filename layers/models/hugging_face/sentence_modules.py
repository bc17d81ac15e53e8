"""Modules of sentence-transformers in the folder of a model: pooling and more.

`modules.json` lists the modules: a Transformer, a Pooling, then Dense and
Normalize; `sentence_bert_config.json` has the longest text, and
`config_sentence_transformers.json` the prompt before each text. Without
`modules.json` the defaults of sentence-transformers hold: the mean of the
tokens, and no further module.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import json
import os
from typing import Any, Final, Never

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers import activations
from paxon.layers.models import sentence_encoder
from paxon.layers.models.hugging_face import family
from paxon.layers.models.hugging_face.files import safetensors_file

MODULES: Final = "modules.json"
PROMPTS: Final = "config_sentence_transformers.json"
# Of a folder, the first one counts.
SETTINGS: Final = tuple(
  f"sentence_{name}_config.json"
  for name in (
    *("bert", "roberta", "distilbert", "camembert", "albert"),
    *("xlm-roberta", "xlnet"),
  )
)
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
# The form of the file before `pooling_mode`, in the order of concatenation.
_FLAGS = {
  "pooling_mode_cls_token": "cls",
  "pooling_mode_max_tokens": "max",
  "pooling_mode_mean_tokens": "mean",
  "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
  "pooling_mode_weightedmean_tokens": "weightedmean",
  "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
  "GELU": activations.gelu_exact,
  "Identity": lambda x: x,
  "ReLU": nn.relu,
  "Sigmoid": nn.sigmoid,
  "SiLU": nn.silu,
  "Tanh": jnp.tanh,
}
_VECTOR = "sentence_embedding"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
  """A trained linear layer with an activation; its weights stay as they are.

  Attributes:
    folder: With `config.json` and `model.safetensors`.
  """

  folder: str

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns vectors [B,F] of vectors [B,D]."""
    kernel, bias, activation = self._loaded
    y = jnp.einsum("BD,FD->BF", x, jnp.asarray(kernel, x.dtype))
    if bias is not None:
      y += jnp.asarray(bias, x.dtype)[None]
    return activation(y)

  @functools.cached_property
  def _loaded(self) -> tuple[np.ndarray, np.ndarray | None, Any]:
    folder = epath.Path(self.folder)
    fields = _Fields(folder / _CONFIG)
    name = fields.text("activation_function", "torch.nn.Tanh")
    activation = _ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None:
      fields.reject("activation_function", " or ".join(_ACTIVATIONS))
    fields.check("use_residual", False, None)
    fields.check("module_input_name", _VECTOR, None)
    fields.check("module_output_name", _VECTOR, None)
    path = folder / _WEIGHTS
    if not path.exists():
      raise family.UnsupportedConfigError(
        f"{os.fspath(path)} is missing; weights in other formats are not"
        " supported."
      )
    entries = safetensors_file.read_header(path)
    names = ["linear.weight", *["linear.bias"] * fields.get("bias", True)]
    shape = fields.get("out_features"), fields.get("in_features")
    arrays = []
    for name, wanted in zip(names, (shape, shape[:1]), strict=False):
      if name not in entries or entries[name].shape != wanted:
        raise family.UnsupportedConfigError(
          f"{os.fspath(path)}: {name} must have the shape {list(wanted)}."
        )
      rows = safetensors_file.read_rows(path, entries[name], 0, wanted[0])
      arrays.append(rows.astype(np.float32))
    return arrays[0], arrays[1] if arrays[1:] else None, activation


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceModules:
  """Settings of a folder for the vectors of texts.

  Attributes:
    is_described: Whether the folder has `modules.json`; all else is a default
      without.
    pooling: Names in `sentence_encoder.POOLINGS`.
    dense: Names of the folders of `Dense` modules, in order.
    normalized: Number of `Dense` modules before each Normalize.
    max_length: Tokens of the longest text; None for those of the model.
    lower_case: Whether texts are converted to lower case.
    prompt: Text before each text.
  """

  is_described: bool = False
  pooling: tuple[str, ...] = ("mean",)
  dense: tuple[str, ...] = ()
  normalized: tuple[int, ...] = ()
  max_length: int | None = None
  lower_case: bool = False
  prompt: str = ""


class _Fields:
  """The fields of a JSON file, none if it does not exist."""

  def __init__(self, path: epath.Path) -> None:
    self._path = path
    self._values: Any = {}
    if path.exists():
      self._values = _read_json(path)
    if not isinstance(self._values, dict):
      raise family.UnsupportedConfigError(
        f"{os.fspath(path)} is not a JSON object."
      )

  def get(self, name: str, default: Any = None) -> Any:
    return self._values.get(name, default)

  def text(self, name: str, default: str) -> str:
    value = self.get(name, default)
    if not isinstance(value, str):
      self.reject(name, "a text")
    return value

  def check(self, name: str, *supported: Any) -> None:
    """Rejects values that are not supported."""
    if self.get(name) not in supported:
      self.reject(name, " or ".join(map(repr, supported)))

  def reject(self, name: str, supported: str) -> Never:
    raise family.UnsupportedConfigError(
      f"{os.fspath(self._path)}: {name} is {str(self.get(name))[:200]!r};"
      f" supported is {supported}."
    )


def read(folder: epath.Path) -> SentenceModules:
  """Returns the modules of a folder of a model.

  Raises:
    UnsupportedConfigError: A file is damaged, or has an unsupported module or
      value.
  """
  listed = list(_list_modules(folder))
  if not listed:
    return SentenceModules()
  kinds = [kind for kind, _ in listed]
  if kinds[:2] != ["Transformer", "Pooling"] or listed[0][1]:
    raise family.UnsupportedConfigError(
      f"{os.fspath(folder / MODULES)} lists {', '.join(kinds)}; supported is a"
      " Transformer in the folder itself, a Pooling, and then Dense, Normalize"
      " and Dropout."
    )
  dense: list[str] = []
  normalized = []
  for kind, name in listed[2:]:
    if kind == "Dense":
      dense.append(name)
    elif kind == "Normalize":
      fields = _Fields(folder / name / _CONFIG)
      fields.check("module_input_name", _VECTOR, None)
      fields.check("module_output_name", _VECTOR, None)
      normalized.append(len(dense))
    elif kind != "Dropout":
      raise family.UnsupportedConfigError(
        f"{os.fspath(folder / MODULES)} lists the module {kind}; supported are"
        " Transformer, Pooling, Dense, Normalize and Dropout."
      )
  path = next((p for n in SETTINGS if (p := folder / n).exists()), None)
  settings = _Fields(folder / SETTINGS[0] if path is None else path)
  prompt = _read_prompt(folder)
  pooling = _Fields(folder / listed[1][1] / _CONFIG)
  if prompt:
    pooling.check("include_prompt", True, None)
  return SentenceModules(
    is_described=True,
    pooling=_read_pooling(pooling),
    dense=tuple(dense),
    normalized=tuple(normalized),
    max_length=_read_length(settings),
    lower_case=bool(settings.get("do_lower_case")),
    prompt=prompt,
  )


def find_folders(folder: epath.Path) -> tuple[str, ...]:
  """Returns the names of the existing folders of modules.

  Raises:
    UnsupportedConfigError: `modules.json` is damaged.
  """
  names = dict.fromkeys(name for _, name in _list_modules(folder) if name)
  return tuple(name for name in names if (folder / name).is_dir())


def make_steps(
  modules: SentenceModules,
  folder: str,
  make: Callable[..., Any],
  *,
  normalize: bool | None = None,
) -> list[Any]:
  """Returns `SentenceEncoder.steps`, built by `make(cls, **fields)`.

  Args:
    modules: Of the folder.
    folder: The folder with the weights.
    make: Such as `fdl.Config`.
    normalize: Whether the result has length one; None follows the modules.
  """
  places = modules.normalized
  if normalize is not None:
    last = len(modules.dense)
    places = (*(x for x in places if x < last), *[last] * normalize)
  steps: list[Any] = []
  for number in range(len(modules.dense) + 1):
    steps += [sentence_encoder.normalize] * (number in places)
    if number < len(modules.dense):
      steps.append(make(Dense, folder=f"{folder}/{modules.dense[number]}"))
  return steps


def _list_modules(folder: epath.Path) -> Iterator[tuple[str, str]]:
  """Yields the kind and the folder of each module."""
  path = folder / MODULES
  if not path.exists():
    return
  found = _read_json(path)
  try:
    listed = [(str(each["type"]), str(each["path"])) for each in found]
    assert listed
  except (KeyError, TypeError, AssertionError):
    raise family.UnsupportedConfigError(
      f"{os.fspath(path)} must be a list of modules with type and path."
    ) from None
  for kind, name in listed:
    # Not a path to a place elsewhere.
    if os.path.basename(name) != name or name in (".", ".."):
      raise family.UnsupportedConfigError(
        f"{os.fspath(path)} names the folder {name[:200]!r}; it must be one in"
        " the same folder."
      )
    yield kind.rpartition(".")[2], name


def _read_pooling(fields: _Fields) -> tuple[str, ...]:
  given = fields.get("pooling_mode")
  modes = [given] if isinstance(given, str) else given
  if modes is None:
    modes = [mode for flag, mode in _FLAGS.items() if fields.get(flag)]
    modes = modes or ["mean"]
  if not isinstance(modes, list) or not modes:
    fields.reject("pooling_mode", "a name or a list of names")
  for mode in modes:
    if mode not in sentence_encoder.POOLINGS:
      fields.reject("pooling_mode", ", ".join(sentence_encoder.POOLINGS))
  return tuple(modes)


def _read_length(fields: _Fields) -> int | None:
  value = fields.get("max_seq_length")
  for name in ("processor_kwargs", "tokenizer_args"):
    if value is None and isinstance(found := fields.get(name), dict):
      value = found.get("model_max_length")
  if value is not None and (type(value) is not int or value < 1):
    fields.reject("max_seq_length", "a positive integer")
  return value


def _read_prompt(folder: epath.Path) -> str:
  fields = _Fields(folder / PROMPTS)
  name, prompts = fields.get("default_prompt_name"), fields.get("prompts")
  if name is None:
    return ""
  prompt = prompts.get(name) if isinstance(prompts, dict) else None
  if not isinstance(prompt, str):
    fields.reject("default_prompt_name", "a name in prompts")
  return prompt


def _read_json(path: epath.Path) -> Any:
  try:
    return json.loads(path.read_text())
  except (OSError, ValueError, RecursionError) as error:
    raise family.UnsupportedConfigError(
      f"{os.fspath(path)} cannot be read ({error})."
    ) from error
