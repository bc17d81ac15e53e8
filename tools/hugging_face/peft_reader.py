"""Reads a folder of PEFT, see `peft_adapter`.

Ranks and factors may differ between layers, and layers may lack adapters.
Whatever else the folder changes, or that an adapter of ours cannot have, is
merged into the values of the base model: `modules_to_save`, biases, and
adapters of embeddings, heads and routers.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any, Final

from etils import epath
import numpy as np

from paxon.layers.models.hugging_face import mapping
from paxon.layers.models.hugging_face.files import safetensors_file
from paxon.quantization import lora
from paxon.tools.hugging_face import peft_adapter, peft_layers

_BIAS = "lora_B.bias"
# Of embeddings; B is [outputs, R] as well.
_LOOKUPS = {
  "lora_embedding_A": peft_adapter.A,
  "lora_embedding_B": peft_adapter.B,
}
_OF_LAYER = re.compile(
  r"(.*?)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_[AB]"
  r"|lora_magnitude_vector)(?:\.weight)?"
)
# Initial values that were subtracted from the base model.
_SUBTRACTED: Final = ("pissa", "olora")


def read(
  folder: epath.Path,
  *,
  names: mapping.Names,
  kernels: Mapping[str, np.ndarray] | None = None,
  adaptable: Collection[str] | None = None,
) -> tuple[peft_adapter.Adapter, dict[str, np.ndarray]]:
  """Reads a folder of PEFT.

  Args:
    folder: With `adapter_config.json` and `adapter_model.safetensors`.
    names: Both names of the weights of the base model.
    kernels: Variables of the base model by logical name; read for DoRA, PiSSA
      and whatever is merged.
    adaptable: Kernels that can have an adapter; adapters of others are merged
      into their kernels. `None` is all.

  Returns:
    The adapter, and its variables by logical name, float32.

  Raises:
    peft_adapter.AdapterError: The adapter is not supported, or of another
      model.
    safetensors_file.DamagedFileError: The file is damaged.
  """
  return _Reader(folder, names, kernels or {}, adaptable).read()


@dataclasses.dataclass(frozen=True)
class _Given:
  """The adapter of a layer in a file.

  Attributes:
    layer: The layer.
    a: [E R, inputs].
    b: [outputs, R E].
    scale: Factor of B A.
    magnitude: [outputs], of DoRA.
  """

  layer: peft_layers.Layer
  a: np.ndarray
  b: np.ndarray
  scale: float
  magnitude: np.ndarray | None

  @property
  def rank(self) -> int:
    """R."""
    return self.a.shape[0] // max(1, self.layer.num_experts)

  def get_expert(self, expert: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [R, inputs] and B [outputs, R] of an expert."""
    count = max(1, self.layer.num_experts)
    a = self.a.reshape(count, self.rank, -1)
    return a[expert], self.b.reshape(-1, self.rank, count)[..., expert]

  def merge(self, part: peft_layers.Part, kernel: np.ndarray) -> np.ndarray:
    """Returns an entry of a kernel with the change of the layer."""
    a, b = self.get_expert(part.expert)
    outputs = part.outputs.reshape(-1)
    base = np.asarray(part.to_matrix(kernel), np.float32)
    rows = np.float32(self.scale) * (b[outputs] @ a[:, part.inputs.reshape(-1)])
    rows += base
    if self.magnitude is not None:
      factor = self.magnitude[outputs] / np.linalg.norm(rows, axis=1)
      rows *= factor[:, None]
    merged = rows.T if part.has_inputs_first else rows
    return merged.reshape(kernel.shape)


class _Reader:
  """Reads one folder."""

  def __init__(
    self,
    folder: epath.Path,
    names: mapping.Names,
    kernels: Mapping[str, np.ndarray],
    adaptable: Collection[str] | None,
  ) -> None:
    self._folder = folder
    self._where = folder / peft_adapter.CONFIG
    self._weights = folder / peft_adapter.WEIGHTS
    self._config = peft_adapter.read_fields(folder)
    if not (folder / peft_adapter.WEIGHTS).exists():
      raise peft_adapter.AdapterError(
        f"{folder / peft_adapter.WEIGHTS} is missing."
      )
    self._entries = safetensors_file.read_header(folder / peft_adapter.WEIGHTS)
    self._names = names
    self._kernels = kernels
    self._adaptable = adaptable
    self._replaced: dict[str, np.ndarray] = {}

  def read(self) -> tuple[peft_adapter.Adapter, dict[str, np.ndarray]]:
    """Returns the adapter, as `read` does."""
    modules: dict[str, dict[str, str]] = {}
    lookups = set()
    for tensor in self._entries:
      name = tensor.removeprefix(peft_adapter.PREFIX)
      match = _OF_LAYER.fullmatch(name)
      if match is None:
        self._replace(tensor, name)
        continue
      if match[2] in _LOOKUPS:
        lookups.add(match[1])
      kind = _LOOKUPS.get(match[2], match[2])
      modules.setdefault(match[1], {})[kind] = tensor
    layers = peft_layers.find_layers(self._names, embeddings=frozenset(lookups))
    if not modules:
      raise peft_adapter.AdapterError(
        f"{self._folder} is an adapter of another model: no tensor is of a"
        " linear layer of this one."
      )
    for module in lookups & {
      t.removesuffix(".weight") for t in self._find_tied()
    }:
      raise peft_adapter.AdapterError(
        f"{self._where}: target_modules has {module}, whose weights"
        " are also those of the head, so PEFT's adapter of one cannot be"
        " stored."
      )
    given = [
      self._read_layer(self._find(module, layers), tensors, module in lookups)
      for module, tensors in modules.items()
    ]
    adapted = []
    for each in given:
      kernels = {part.kernel for part in each.layer.parts}
      is_ours = self._adaptable is None or kernels <= set(self._adaptable)
      if is_ours and each.layer.name not in lookups:
        adapted.append(each)
      else:
        self._merge(each)
    return self._to_variables(adapted)

  def _find_tied(self) -> set[str]:
    """Returns the tensors that files may hold under another name, too."""
    return set(self._names.tied.values())

  def _find(
    self, module: str, layers: Mapping[str, peft_layers.Layer]
  ) -> peft_layers.Layer:
    """Returns the layer of a module of the file."""
    if module in layers:
      return layers[module]
    outer = module
    while outer.endswith(peft_adapter.BASE):
      outer = outer.removesuffix(peft_adapter.BASE)
    depth = (len(module) - len(outer)) // len(peft_adapter.BASE)
    # Wrappers of parameters of one module are nested, the first one inside.
    targets = self._config.get("target_parameters") or []
    wrapped = [
      name
      for name in peft_layers.FUSED
      if any(f".{outer}.{name}".endswith(f".{target}") for target in targets)
    ]
    if depth < len(wrapped):
      found = layers.get(f"{outer}.{wrapped[-1 - depth]}")
      if found is not None:
        return found
    if f"{outer}.weight" in self._names.tied:
      raise peft_adapter.AdapterError(
        f"{self._where}: target_modules has {outer}, whose weights are"
        " also those of the embedding, so PEFT's adapter of one cannot be"
        " stored."
      )
    raise peft_adapter.AdapterError(
      f"{self._folder} is an adapter of another model:"
      f" {peft_adapter.PREFIX}{module} is no linear layer of this one."
    )

  def _values(self, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    entry = self._entries[tensor]
    if entry.shape != shape:
      raise peft_adapter.AdapterError(
        f"{self._folder} is an adapter of another model: {tensor} must have"
        f" shape {list(shape)}, got {list(entry.shape)}."
      )
    rows = safetensors_file.read_rows(self._weights, entry, 0, shape[0])
    return np.asarray(rows, np.float32)

  def _read_layer(
    self,
    layer: peft_layers.Layer,
    tensors: Mapping[str, str],
    is_lookup: bool,
  ) -> _Given:
    """Returns the adapter of a layer, after adding its bias to the base."""
    config, where = self._config, self._where
    rank = _find_pattern(config, "rank_pattern", layer.name, config["r"])
    alpha = _find_pattern(
      config, "alpha_pattern", layer.name, config["lora_alpha"]
    )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    is_dora = bool(config.get("use_dora"))
    required = {peft_adapter.A, peft_adapter.B} | (
      {peft_adapter.MAGNITUDE} if is_dora else set()
    )
    missing = required - tensors.keys()
    if missing:
      raise peft_adapter.AdapterError(
        f"{self._weights} has no {min(missing)} of {layer.name}."
      )
    rows = rank * max(1, layer.num_experts)
    a = self._values(tensors[peft_adapter.A], (rows, layer.num_inputs))
    b = self._values(tensors[peft_adapter.B], (layer.num_outputs, rows))
    if is_dora and is_lookup:
      raise peft_adapter.AdapterError(
        f"{where}: use_dora is not supported for the embedding {layer.name}."
      )
    magnitude = None
    if is_dora:
      magnitude = self._values(
        tensors[peft_adapter.MAGNITUDE], (layer.num_outputs,)
      )
    found = _Given(layer, a, b, scale, magnitude)
    if _BIAS in tensors:
      self._add_bias(found, self._values(tensors[_BIAS], (layer.num_outputs,)))
    return self._subtract_initial(found)

  def _add_bias(self, given: _Given, bias: np.ndarray) -> None:
    tensor = self._names.tensors.get(f"{given.layer.name}.bias")
    if tensor is None or given.magnitude is not None:
      what = "a bias to add it to" if tensor is None else "LoRA without DoRA"
      raise peft_adapter.AdapterError(
        f"{self._where}: lora_bias requires {what}, and"
        f" {given.layer.name} has none."
      )
    for part in tensor.slices:
      value = self._get_changed(part.leaf)
      added = given.scale * bias[part.start : part.stop]
      value[part.index] += part.layout.to_variable(added)

  def _subtract_initial(self, given: _Given) -> _Given:
    """Returns an adapter that PEFT adds to the base model less initial ones.

    The initial one has the same rank, so that of both is twice as large.
    """
    kind = self._config.get("init_lora_weights")
    if kind not in _SUBTRACTED:
      return given
    layer, rank = given.layer, given.rank
    if layer.num_experts or given.magnitude is not None:
      raise peft_adapter.AdapterError(
        f"{self._where}: init_lora_weights {kind!r} of {layer.name}"
        " is not supported with DoRA or experts."
      )
    whole = np.zeros((layer.num_outputs, layer.num_inputs), np.float32)
    for part in layer.parts:
      matrix = part.to_matrix(self._kernels[part.kernel][part.index])
      at = np.ix_(part.outputs.reshape(-1), part.inputs.reshape(-1))
      whole[at] = matrix
    if kind == "pissa":
      u, s, v = np.linalg.svd(whole, full_matrices=False)
      b, a = u[:, :rank] * (s[:rank] / given.scale), v[:rank]
    else:
      q, r = np.linalg.qr(whole)
      b, a = q[:, :rank], r[:rank]
    return dataclasses.replace(
      given,
      a=np.concatenate([given.a, a]),
      b=np.concatenate([given.b, -b], axis=1),
    )

  def _get_changed(self, leaf: str) -> np.ndarray:
    """Returns the values of a base variable, to be changed in place."""
    if leaf not in self._replaced:
      self._replaced[leaf] = np.array(self._kernels[leaf], np.float32)
    return self._replaced[leaf]

  def _read_base(self, name: str) -> np.ndarray:
    """Returns a tensor of the base model that is one variable."""
    (part,) = self._names.tensors[name].slices
    return part.layout.to_tensor(
      np.asarray(self._kernels[part.leaf], np.float32)
    )

  def _make_tie_error(self, name: str, other: str) -> peft_adapter.AdapterError:
    return peft_adapter.AdapterError(
      f"{self._where}: modules_to_save has {name.removesuffix('.weight')},"
      f" whose weights are also those of {other} in the base model"
      " (tie_word_embeddings), and differ."
    )

  def _replace(self, tensor: str, name: str) -> None:
    """Takes a tensor of the base model, of `modules_to_save` or a bias."""
    name = _to_tensor(name)
    source = self._names.tensors.get(name)
    if source is None and name in self._names.tied:
      other = self._names.tied[name]
      shape = self._names.tensors[other].shape
      twin = next(
        (
          each
          for each in self._entries
          if each.replace(peft_adapter.BASE, "").removeprefix(
            peft_adapter.PREFIX
          )
          == other
        ),
        None,
      )
      if twin is not None:
        expected = self._values(twin, shape)
      else:
        expected = self._read_base(other)
      if np.array_equal(self._values(tensor, shape), expected):
        return
      raise self._make_tie_error(name, other)
    if source is None:
      raise peft_adapter.AdapterError(
        f"{self._folder} is an adapter of another model: {tensor} is no weight"
        " of this one."
      )
    values = self._values(tensor, source.shape)
    # PEFT copies the module; the one that shares its weights keeps the base's.
    given = set(map(_to_tensor, self._entries))
    for twin, other in self._names.tied.items():
      is_alone = other == name and twin not in given
      if is_alone and not np.array_equal(values, self._read_base(name)):
        raise self._make_tie_error(name, twin)
    for part in source.slices:
      rows = values[part.start : part.stop]
      self._get_changed(part.leaf)[part.index] = part.layout.to_variable(rows)

  def _merge(self, given: _Given) -> None:
    """Merges an adapter into the base model's kernels."""
    for part in given.layer.parts:
      kernel = self._get_changed(part.kernel)
      kernel[part.index] = given.merge(part, kernel[part.index])

  def _to_variables(
    self, given: Sequence[_Given]
  ) -> tuple[peft_adapter.Adapter, dict[str, np.ndarray]]:
    config = self._config
    rank = max((each.rank for each in given), default=1)
    scale = given[0].scale if given else 1.0
    kind = lora.Kind.LORA
    if config.get("use_dora"):
      kind = lora.Kind.DORA
    elif config.get("use_rslora") and all(e.rank == rank for e in given):
      kind = lora.Kind.RSLORA
    root = math.sqrt(rank) if kind is lora.Kind.RSLORA else rank
    alpha = float(config["lora_alpha"])
    if scale != alpha / root:
      alpha = scale * root
    adapter = lora.Lora(rank=rank, alpha=alpha, kind=kind)
    found: dict[str, np.ndarray] = {}
    for each in given:
      for part in each.layer.parts:
        a, b = each.get_expert(part.expert)
        factor = np.float32(each.scale / scale)
        values = {
          lora.A: np.moveaxis(a[:, part.inputs], 0, -1),
          lora.B: np.moveaxis(factor * b[part.outputs], -1, 0),
        }
        if each.magnitude is not None:
          kernel = self._kernels[part.kernel][part.index]
          matrix = np.asarray(part.to_matrix(kernel), np.float32)
          norms = np.linalg.norm(matrix, axis=1).reshape(part.outputs.shape)
          values[lora.MAGNITUDE] = each.magnitude[part.outputs] - norms
        self._put(found, part, values, rank)
    matmuls = {lora.find_kernel_name(name).rpartition("/")[2] for name in found}
    return (
      peft_adapter.Adapter(
        adapter,
        tuple(sorted(matmuls)),
        has_experts=any("/experts/" in name for name in found),
        replaced=self._replaced,
      ),
      found,
    )

  def _put(
    self,
    found: dict[str, np.ndarray],
    part: peft_layers.Part,
    values: Mapping[str, np.ndarray],
    rank: int,
  ) -> None:
    """Stores the values of an entry, of a smaller rank with zeros behind."""
    lead = self._names.leaves[part.kernel].shape[: len(part.index)]
    for variable, value in values.items():
      shape = list(value.shape)
      at: list[Any] = [slice(None)] * value.ndim
      if variable != lora.MAGNITUDE:
        axis = value.ndim - 1 if variable == lora.A else 0
        at[axis] = slice(shape[axis])
        shape[axis] = rank
      name = lora.name_variable(part.kernel, variable)
      if name not in found:
        found[name] = np.zeros((*lead, *shape), np.float32)
      found[name][(*part.index, *at)] = value


def _to_tensor(name: str) -> str:
  """Returns the name of a tensor of the base model that a file holds."""
  name = name.removeprefix(peft_adapter.PREFIX)
  return name.replace(peft_adapter.BASE, "").replace(".modules_to_save", "")


def _find_pattern(
  config: Mapping[str, Any], field: str, layer: str, default: Any
) -> Any:
  """Returns the value for a layer, by the first pattern that matches it."""
  patterns = config.get(field) or {}
  for pattern, value in patterns.items():
    if re.match(rf"(.*\.)?({pattern})$", layer):
      return value
  return default
