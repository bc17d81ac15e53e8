"""Low-rank adapters in the files of PEFT.

A folder of PEFT has `adapter_config.json` and `adapter_model.safetensors` with,
for each adapted linear layer of the Hugging Face model,

  base_model.model.<layer>.lora_A.weight            [R, inputs]
  base_model.model.<layer>.lora_B.weight            [outputs, R]
  base_model.model.<layer>.lora_magnitude_vector    [outputs], of DoRA

See `quantization.lora` for the variables of Paxon. DoRA's magnitudes are stored
there as differences to the norms of the base model's kernels.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import re
from typing import Any, Final

from etils import epath
import jax.numpy as jnp
import numpy as np

from paxon.layers.models.hugging_face import mapping, safetensors_file
from paxon.quantization import lora

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B, _MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
_OF_VARIABLE = {lora.A: _A, lora.B: _B, lora.MAGNITUDE: _MAGNITUDE}
_RANK = "rank"
# Options that change outputs, with the values of ordinary adapters.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
  "peft_type": ("LORA",),
  "bias": ("none",),
  "lora_bias": (None, False),
  "rank_pattern": (None, {}),
  "alpha_pattern": (None, {}),
  "layer_replication": (None, []),
  "modules_to_save": (None, []),
  "target_parameters": (None, []),
  "trainable_token_indices": (None, [], {}),
  "use_qalora": (None, False),
  "alora_invocation_tokens": (None, []),
  "use_bdlora": (None, False),
  "layers_to_transform": (None,),
  "layers_pattern": (None,),
  # Other initializations change the base model.
  "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}


class AdapterError(ValueError):
  """An adapter does not match the model or is not supported."""


@dataclasses.dataclass(frozen=True)
class Piece:
  """One layer's part of a variable.

  Attributes:
    tensor: Name of the tensor in the file.
    index: Entry of the variable along axes of layers and experts.
    layout: Layout of both.
  """

  tensor: str
  index: tuple[int, ...]
  layout: mapping.Layout


@dataclasses.dataclass(frozen=True)
class Adapter:
  """A PEFT adapter.

  Attributes:
    lora: Rank, alpha and kind.
    targets: Names of the adapted linear layers, such as `q_proj`.
    base: Name or path of the base model, if known.
  """

  lora: lora.Lora
  targets: tuple[str, ...]
  base: str | None = None

  def to_config(self) -> dict[str, Any]:
    """Returns the content of `adapter_config.json`."""
    of = self.lora
    return {
      "peft_type": "LORA",
      "task_type": "CAUSAL_LM",
      "base_model_name_or_path": self.base,
      "r": of.rank,
      "lora_alpha": of.rank if of.alpha is None else of.alpha,
      "use_rslora": of.kind is lora.Kind.RSLORA,
      "use_dora": of.kind is lora.Kind.DORA,
      "target_modules": sorted(self.targets),
      "lora_dropout": 0.0,
      "bias": "none",
      "fan_in_fan_out": False,
      "inference_mode": True,
    }


def find_kernel(variable: str) -> str:
  """Returns the name of the kernel that an adapter's variable changes."""
  layer, matmul, _ = variable.rsplit("/", 2)
  return f"{layer.removesuffix('/einsum')}/{matmul}"


def name_variable(kernel: str, variable: str) -> str:
  """Returns the name of an adapter's variable, such as `lora.A`."""
  layer, _, matmul = kernel.rpartition("/")
  return f"{layer}/einsum/{matmul}/{variable}"


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
  tensors: dict[str, np.ndarray] = {}
  for name, value in variables.items():
    kernel, variable = find_kernel(name), name.rpartition("/")[2]
    if variable == lora.MAGNITUDE:
      rank = variables[name_variable(kernel, lora.A)]
      value = value + _norms(kernels[kernel], value, rank)
    for piece in find_pieces(names, kernel, variable, adapter.rank):
      tensor = piece.layout.to_tensor(value[piece.index])
      tensors[piece.tensor] = np.asarray(tensor, np.float32)
  targets = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
  found = Adapter(adapter, tuple(sorted(targets)), base)
  folder.mkdir(parents=True, exist_ok=True)
  described = {name: (each.dtype, each.shape) for name, each in tensors.items()}
  with safetensors_file.Writer(folder / WEIGHTS, described) as writer:
    for name, each in tensors.items():
      writer.write_rows(name, 0, each)
  text = json.dumps(found.to_config(), indent=2)
  (folder / CONFIG).write_text(text + "\n")
  return found


def read(
  folder: epath.Path,
  *,
  names: mapping.Names,
  kernels: Mapping[str, np.ndarray] | None = None,
) -> tuple[Adapter, dict[str, np.ndarray]]:
  """Reads a folder of PEFT.

  Args:
    folder: With `adapter_config.json` and `adapter_model.safetensors`.
    names: Both names of the weights of the base model.
    kernels: Kernels of the base model by logical name, for DoRA.

  Returns:
    The adapter, and its variables by logical name, float32.

  Raises:
    AdapterError: The adapter is not supported, or of another model.
    safetensors_file.DamagedFileError: The file is damaged.
  """
  adapter = read_config(folder)
  if not (folder / WEIGHTS).exists():
    raise AdapterError(f"{folder / WEIGHTS} is missing.")
  entries = safetensors_file.read_header(folder / WEIGHTS)
  unused = dict(entries)
  found: dict[str, np.ndarray] = {}
  adapted = {name.split(".lora_")[0] for name in entries}
  for kernel, leaf in names.leaves.items():
    layers = {_module(tensor.name) for tensor, _ in leaf.sources} & adapted
    if not layers:
      continue
    for variable in _variables_of(adapter):
      value: np.ndarray | None = None
      for piece in find_pieces(names, kernel, variable, adapter.rank):
        entry = entries.get(piece.tensor)
        shape = piece.layout.tensor_shape
        if entry is None or entry.shape != shape:
          got = "nothing" if entry is None else str(list(entry.shape))
          raise AdapterError(
            f"{folder} is an adapter of another model: {piece.tensor} must have"
            f" shape {list(shape)}, got {got}."
          )
        del unused[piece.tensor]
        rows = safetensors_file.read_rows(
          folder / WEIGHTS, entry, 0, entry.shape[0]
        )
        one = piece.layout.to_variable(np.asarray(rows, np.float32))
        if value is None:
          leading = leaf.shape[: len(piece.index)]
          value = np.zeros((*leading, *one.shape), np.float32)
        value[piece.index] = one
      assert value is not None
      found[name_variable(kernel, variable)] = value
    if adapter.kind is lora.Kind.DORA:
      assert kernels is not None
      name = name_variable(kernel, lora.MAGNITUDE)
      a = found[name_variable(kernel, lora.A)]
      found[name] -= _norms(kernels[kernel], found[name], a)
  if unused or not found:
    first = next(iter(unused), "no tensor")
    raise AdapterError(
      f"{folder} is an adapter of another model: {first} is of no linear layer"
      " of this one."
    )
  targets = {find_kernel(name).rpartition("/")[2] for name in found}
  return Adapter(adapter, tuple(sorted(targets))), found


def merge(
  variables: Mapping[str, np.ndarray], adapter: lora.Lora
) -> dict[str, np.ndarray]:
  """Returns the weights of a model with its adapters merged.

  Args:
    variables: Kernels, adapters and all other variables by logical name.
    adapter: Rank, alpha and kind.
  """
  merged = {
    name: value
    for name, value in variables.items()
    if not re.fullmatch(lora.PATTERN, name)
  }
  for name in variables:
    if not name.endswith(f"/{lora.A}"):
      continue
    kernel = find_kernel(name)
    a, b, magnitude = (
      variables.get(name_variable(kernel, each))
      for each in (lora.A, lora.B, lora.MAGNITUDE)
    )
    whole = lora.merge(
      jnp.asarray(variables[kernel]),
      jnp.asarray(a),
      jnp.asarray(b),
      None if magnitude is None else jnp.asarray(magnitude),
      lora=adapter,
    )
    merged[kernel] = np.asarray(whole)
  return merged


def read_config(folder: epath.Path) -> lora.Lora:
  """Returns what `adapter_config.json` says.

  Raises:
    AdapterError: The file is missing, or the adapter is not supported.
  """
  path = folder / CONFIG
  try:
    config = json.loads(path.read_text())
    for field, values in _NEUTRAL.items():
      if config.get(field, values[0]) not in values:
        raise AdapterError(
          f"{path}: {field} must be {values[0]!r}, got {config[field]!r}."
        )
    kind = lora.Kind.LORA
    if config.get("use_dora") and config.get("use_rslora"):
      raise AdapterError(f"{path}: use_dora with use_rslora is not supported.")
    if config.get("use_dora"):
      kind = lora.Kind.DORA
    if config.get("use_rslora"):
      kind = lora.Kind.RSLORA
    return lora.Lora(
      rank=config["r"], alpha=float(config["lora_alpha"]), kind=kind
    )
  except AdapterError:
    raise
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise AdapterError(
      f"{path} is not the configuration of a PEFT adapter ({error!r})."
    ) from error


def _variables_of(adapter: lora.Lora) -> Sequence[str]:
  base = (lora.A, lora.B)
  return (*base, lora.MAGNITUDE) if adapter.kind is lora.Kind.DORA else base


def _module(tensor: str) -> str:
  return _PREFIX + tensor.removesuffix(".weight")


def find_pieces(
  names: mapping.Names, kernel: str, variable: str, rank: int
) -> Iterator[Piece]:
  """Yields the layers of an adapter's variable."""
  leaf = names.leaves.get(kernel)
  if leaf is None:
    raise AdapterError(f"{kernel} is no weight of the Hugging Face model.")
  for tensor, part in leaf.sources:
    sides, _, stored = part.layout.pattern.partition("->")
    terms = mapping.split_dimensions(sides)
    order = stored.split()
    if len(terms) != 2 or part.layout.shares_rows or len(tensor.slices) > 1:
      raise AdapterError(
        f"{kernel} shares the tensor {tensor.name}, so PEFT has no adapter for"
        " it alone."
      )
    outputs, inputs = terms
    if order[-1] in inputs:
      # `Conv1D` of GPT-2 stores inputs first.
      outputs, inputs = inputs, outputs
    if order != [*inputs, *outputs]:
      raise AdapterError(f"{kernel} {order} does not have its inputs first.")
    inside, outside = " ".join(inputs), " ".join(outputs)
    pattern = {
      lora.A: f"{_RANK} ({inside}) -> {inside} {_RANK}",
      lora.B: f"({outside}) {_RANK} -> {_RANK} {outside}",
      lora.MAGNITUDE: f"({outside}) -> {outside}",
    }[variable]
    sizes = {**part.layout.sizes, _RANK: rank}
    yield Piece(
      f"{_module(tensor.name)}.{_OF_VARIABLE[variable]}",
      part.index,
      mapping.Layout(pattern, sizes),
    )


def _norms(
  kernel: np.ndarray, magnitude: np.ndarray, a: np.ndarray
) -> np.ndarray:
  """Returns the norms of a kernel's outputs in the shape of magnitudes."""
  # Axes: batch, inputs, outputs; `a` has batch, inputs and the rank.
  num_inputs = kernel.ndim - magnitude.ndim
  axes = tuple(range(a.ndim - 1 - num_inputs, a.ndim - 1))
  squares = np.square(np.asarray(kernel, np.float32))
  return np.sqrt(np.sum(squares, axis=axes))
