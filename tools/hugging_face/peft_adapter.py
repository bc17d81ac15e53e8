"""Low-rank adapters in the files of PEFT.

A folder of PEFT has `adapter_config.json` and `adapter_model.safetensors` with,
for each adapted linear layer of the Hugging Face model,

  base_model.model.<layer>.lora_A.weight            [R, inputs]
  base_model.model.<layer>.lora_B.weight            [outputs, R]
  base_model.model.<layer>.lora_magnitude_vector    [outputs], of DoRA

and, for E experts, A [E R, inputs] and B [outputs, R E] of a module `experts`,
whose further parameters are in `experts.base_layer`.

See `quantization.lora` for the variables of Paxon. DoRA's magnitudes are stored
there as differences to the norms of the base model's kernels. All adapters of a
model have one rank and factor there: those of a smaller rank are padded with
zeros, which have no gradient, and other factors are multiplied into B.

`peft_reader` reads folders.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import json
import math
import re
from typing import Any, Final

from etils import epath
import jax.numpy as jnp
import numpy as np

from paxon.layers.models.hugging_face import mapping
from paxon.layers.models.hugging_face.files import safetensors_file
from paxon.quantization import lora
from paxon.tools.hugging_face import peft_layers

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
# Of a run: the variables of the base model that an imported adapter changed.
REPLACED: Final = "changed_by_adapter.txt"
PREFIX = "base_model.model."
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
BASE = ".base_layer"
# Options that change outputs and have no effect with these values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
  "peft_type": ("LORA",),
  "layer_replication": (None, []),
  "trainable_token_indices": (None, [], {}),
  "use_qalora": (None, False),
  "alora_invocation_tokens": (None, []),
  "use_bdlora": (None, False),
  "arrow_config": (None,),
  "kasa_config": (None,),
  "monteclora_config": (None,),
  # Others change the base model by random numbers or by data.
  "init_lora_weights": (
    True,
    False,
    None,
    "gaussian",
    "orthogonal",
    "eva",
    "mica",
    "pissa",
    "olora",
  ),
}


class AdapterError(ValueError):
  """An adapter does not match the model or is not supported."""


@dataclasses.dataclass(frozen=True)
class Adapter:
  """A PEFT adapter.

  Attributes:
    lora: Rank, alpha and kind.
    targets: Names of the adapted linear layers, such as `q_proj`.
    parameters: Names of adapted parameters of all experts.
    ranks: Other ranks, by the name of the layer.
    has_experts: Whether kernels of experts have adapters.
    replaced: Other values of the base model's variables, by logical name.
    base: Name or path of the base model, if known.
  """

  lora: lora.Lora
  targets: tuple[str, ...]
  parameters: tuple[str, ...] = ()
  ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
  has_experts: bool = False
  replaced: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  base: str | None = None

  def to_config(self) -> dict[str, Any]:
    """Returns the content of `adapter_config.json`."""
    of = self.lora
    alpha = of.rank if of.alpha is None else of.alpha
    # With the same factor.
    alphas = {
      name: alpha
      * (
        math.sqrt(rank / of.rank)
        if of.kind is lora.Kind.RSLORA
        else rank / of.rank
      )
      for name, rank in self.ranks.items()
    }
    return {
      "peft_type": "LORA",
      "task_type": "CAUSAL_LM",
      "base_model_name_or_path": self.base,
      "r": of.rank,
      "lora_alpha": alpha,
      "use_rslora": of.kind is lora.Kind.RSLORA,
      "use_dora": of.kind is lora.Kind.DORA,
      "target_modules": sorted(self.targets),
      "target_parameters": sorted(self.parameters) or None,
      "rank_pattern": dict(self.ranks),
      "alpha_pattern": alphas,
      "lora_dropout": 0.0,
      "bias": "none",
      "fan_in_fan_out": False,
      "inference_mode": True,
    }


def write(
  folder: epath.Path,
  variables: Mapping[str, np.ndarray],
  *,
  names: mapping.Names,
  adapter: lora.Lora,
  kernels: Mapping[str, np.ndarray],
  base: str | None = None,
) -> Adapter:
  """Writes a folder of PEFT.

  Args:
    folder: Local; created if missing.
    variables: Variables of the adapters by logical name.
    names: Both names of the weights of the base model.
    adapter: Rank, alpha and kind.
    kernels: Kernels of the base model by logical name, read for DoRA.
    base: Name or path of the base model; None writes none.

  Raises:
    AdapterError: A kernel is not a linear layer of the Hugging Face model.
  """
  by_kernel = dict.fromkeys(map(lora.find_kernel_name, variables))
  tensors: dict[str, np.ndarray] = {}
  targets, parameters, skipped = set(), set(), False
  ranks: dict[str, int] = {}
  written = _find_written(peft_layers.find_layers(names), by_kernel)
  for layer in written:
    parts = [part for part in layer.parts if part.kernel in by_kernel]
    given = [
      {
        variable: variables[name][part.index]
        for variable in _list_variables(adapter)
        if (name := lora.name_variable(part.kernel, variable)) in variables
      }
      for part in parts
    ]
    if not any(np.any(each[lora.A]) for each in given):
      # No adapter, of a layer among others.
      skipped = True
      continue
    a, b = _join(layer, parts, given, adapter.rank)
    if a.shape[0] != adapter.rank * max(1, layer.num_experts):
      ranks[layer.name] = a.shape[0] // max(1, layer.num_experts)
    module = layer.name
    if layer.num_experts:
      if adapter.kind is lora.Kind.DORA:
        raise AdapterError(
          f"{layer.name} has adapters of kind dora, and PEFT has none for"
          " experts; export the merged model without --adapter."
        )
      module, parameter = _name_experts(layer, written)
      parameters.add(parameter)
    else:
      targets.add(layer.name)
    tensors[f"{PREFIX}{module}.{A}"] = a
    tensors[f"{PREFIX}{module}.{B}"] = b
    if adapter.kind is lora.Kind.DORA:
      magnitude = _compute_magnitude(layer, parts, given, kernels)
      tensors[f"{PREFIX}{module}.{MAGNITUDE}"] = magnitude
  if not skipped:
    targets = {name.rpartition(".")[2] for name in targets}
  found = Adapter(
    adapter,
    tuple(sorted(targets)),
    tuple(sorted(parameters)),
    ranks,
    base=base,
  )
  _write_files(folder, found, tensors)
  return found


def _write_files(
  folder: epath.Path, adapter: Adapter, tensors: Mapping[str, np.ndarray]
) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  described = {name: (each.dtype, each.shape) for name, each in tensors.items()}
  with safetensors_file.Writer(folder / WEIGHTS, described) as writer:
    for name, each in tensors.items():
      writer.write_rows(name, 0, each)
  text = json.dumps(adapter.to_config(), indent=2)
  (folder / CONFIG).write_text(text + "\n")


def _name_experts(
  layer: peft_layers.Layer, written: Sequence[peft_layers.Layer]
) -> tuple[str, str]:
  """Returns the module that adapts a kernel of experts, and the parameter."""
  module, _, parameter = layer.name.rpartition(".")
  name = f"{module.rpartition('.')[2]}.{parameter}"
  # The first parameter is that of the inner module.
  others = {each.name for each in written} - {layer.name}
  if parameter == "gate_up_proj" and f"{module}.down_proj" in others:
    module += BASE
  return module, name


def _compute_magnitude(
  layer: peft_layers.Layer,
  parts: Sequence[peft_layers.Part],
  given: Sequence[Mapping[str, np.ndarray]],
  kernels: Mapping[str, np.ndarray],
) -> np.ndarray:
  """Returns DoRA's magnitudes of the outputs of a layer."""
  magnitude = np.zeros(layer.num_outputs, np.float32)
  for part, each in zip(parts, given, strict=True):
    matrix = part.to_matrix(kernels[part.kernel][part.index])
    norms = np.linalg.norm(np.asarray(matrix, np.float32), axis=1)
    delta = each[lora.MAGNITUDE].reshape(-1)
    magnitude[part.outputs.reshape(-1)] = norms + delta
  return magnitude


def _find_written(
  layers: Mapping[str, peft_layers.Layer], kernels: Collection[str]
) -> list[peft_layers.Layer]:
  """Returns the layers of kernels, of experts those of all experts.

  Raises:
    AdapterError: A kernel is no linear layer.
  """
  fused = {
    part.kernel
    for layer in layers.values()
    if layer.num_experts
    for part in layer.parts
  }
  found = [
    layer
    for layer in layers.values()
    if any(part.kernel in kernels for part in layer.parts)
    and (layer.num_experts or layer.parts[0].kernel not in fused)
  ]
  known = {part.kernel for layer in found for part in layer.parts}
  for kernel in kernels:
    if kernel not in known:
      raise AdapterError(f"{kernel} is no weight of the Hugging Face model.")
  return found


def _join(
  layer: peft_layers.Layer,
  parts: Sequence[peft_layers.Part],
  given: Sequence[Mapping[str, np.ndarray]],
  rank: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns A and B of a layer as in files.

  Parts with different A have ranks of their own: B is block diagonal.
  """
  kernels = list(dict.fromkeys(part.kernel for part in parts))
  flat = [each[lora.A].reshape(-1, rank) for each in given]
  firsts = {
    part.expert: a
    for part, a in zip(parts, flat, strict=True)
    if part.kernel == kernels[0]
  }
  is_shared = all(
    np.array_equal(firsts[part.expert], a)
    for part, a in zip(parts, flat, strict=True)
  )
  total = rank if is_shared else rank * len(kernels)
  count = max(1, layer.num_experts)
  a = np.zeros((count, total, layer.num_inputs), np.float32)
  b = np.zeros((layer.num_outputs, total, count), np.float32)
  for part, one, each in zip(parts, flat, given, strict=True):
    start = 0 if is_shared else rank * kernels.index(part.kernel)
    rows = slice(start, start + rank)
    a[part.expert, rows, part.inputs.reshape(-1)] = one
    outputs = part.outputs.reshape(-1)
    b[outputs, rows, part.expert] = each[lora.B].reshape(rank, -1).T
  return (
    a.reshape(-1, layer.num_inputs),
    b.reshape(layer.num_outputs, -1),
  )


def merge(
  variables: Mapping[str, np.ndarray], adapter: lora.Lora
) -> dict[str, np.ndarray]:
  """Returns the weights of a model with its adapters merged.

  Args:
    variables: Kernels, adapters and all other variables by logical name.
    adapter: Rank, alpha and kind.
  """
  arrays = {name: jnp.asarray(value) for name, value in variables.items()}
  merged = lora.merge_variables(arrays, adapter)
  return {name: np.asarray(value) for name, value in merged.items()}


def read_config(folder: epath.Path) -> lora.Lora:
  """Returns the adapter that `adapter_config.json` describes.

  Raises:
    AdapterError: The file is missing, or the adapter is not supported.
  """
  config = read_fields(folder)
  kind = lora.Kind.LORA
  if config.get("use_dora"):
    kind = lora.Kind.DORA
  elif config.get("use_rslora"):
    kind = lora.Kind.RSLORA
  return lora.Lora(
    rank=config["r"], alpha=float(config["lora_alpha"]), kind=kind
  )


def read_fields(folder: epath.Path) -> dict[str, Any]:
  """Returns the fields of `adapter_config.json`.

  Raises:
    AdapterError: The file is missing, or the adapter is not supported.
  """
  path = folder / CONFIG
  try:
    config = json.loads(path.read_text())
    for field, values in _NEUTRAL.items():
      if config.get(field, values[0]) not in values:
        allowed = " or ".join(json.dumps(value) for value in values)
        raise AdapterError(
          f"{path}: {field} must be {allowed}, got {json.dumps(config[field])}."
        )
    for field in ("r", "lora_alpha"):
      number = config[field]
      if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise AdapterError(f"{path}: {field} must be a number, got {number!r}.")
    for field in ("rank_pattern", "alpha_pattern"):
      for pattern, number in (config.get(field) or {}).items():
        re.compile(pattern)
        if isinstance(number, bool) or not number > 0:
          raise AdapterError(
            f"{path}: {field}[{pattern!r}] must be positive, got {number!r}."
          )
    lora.Lora(rank=config["r"], alpha=float(config["lora_alpha"]))
    return config
  except AdapterError:
    raise
  except (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    re.error,
  ) as error:
    raise AdapterError(
      f"{path} is not the configuration of a PEFT adapter ({error!r})."
    ) from error


def _list_variables(adapter: lora.Lora) -> Sequence[str]:
  base = (lora.A, lora.B)
  return (*base, lora.MAGNITUDE) if adapter.kind is lora.Kind.DORA else base
