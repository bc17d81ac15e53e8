"""Export of int4 weights to folders that serving engines load.

Linear layers whose kernels a conversion has quantized (`quantization=
int4_gptq:convert`) are written in one of two formats.

`compressed-tensors`, in its format pack-quantized:

  weight_packed   int32 [outputs, inputs / 8], eight values of four bits each
  weight_scale    [outputs, groups of inputs]
  weight_shape    int64 [2]

`gptq`, that of AutoGPTQ and GPTQModel, whose values have no sign: they are
those of ours and 8, the zero point, of which the files have 7:

  qweight   int32 [inputs / 8, outputs], eight values of four bits each
  qzeros    int32 [groups, outputs / 8]
  scales    float16 [groups, outputs]
  g_idx     int32 [inputs], the group of each input

All other tensors are written as they are.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import json
import math
import os
import re
from typing import Any, Final

from etils import epath
import jax.numpy as jnp
import numpy as np

from paxon.layers.models.hugging_face import mapping
from paxon.quantization import number_formats, recipes, served_einsum
from paxon.quantization import recipe as recipe_lib
from paxon.runner import user_error
from paxon.runner.checkpoints import stored_checkpoint

COMPRESSED: Final = "compressed-tensors"
GPTQ: Final = "gptq"
FORMATS: Final = (COMPRESSED, GPTQ)

_WEIGHT = ".weight"
# Values in an int32.
_PACKED = 8
# The zero point, as loaders of `gptq` expect it.
_STORED_ZEROS = 0x77777777


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The quantized tensors of an export.

  Attributes:
    kernels: Name of the stored values by that of the parameter they replace.
    group: Inputs with the same scale; None is all of an output.
    tensors: Shapes of the Hugging Face tensors, by name.
    kind: The format, one of `FORMATS`.
  """

  kernels: Mapping[str, str]
  group: int | None
  tensors: Mapping[str, tuple[int, int]]
  kind: str

  def describe(self, dtype: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Returns dtype and shape of the tensors of quantized layers.

    `dtype` is that of scales; None is float32. In `gptq` they are float16.
    """
    found: dict[str, tuple[Any, tuple[int, ...]]] = {}
    scale = np.dtype(np.float32) if dtype is None else np.dtype(dtype)
    int32 = np.dtype(np.int32)
    for name, (outputs, inputs) in self.tensors.items():
      stem = name.removesuffix(_WEIGHT)
      groups = 1 if self.group is None else inputs // self.group
      if self.kind == GPTQ:
        found[f"{stem}.qweight"] = int32, (inputs // _PACKED, outputs)
        found[f"{stem}.qzeros"] = int32, (groups, outputs // _PACKED)
        found[f"{stem}.scales"] = np.dtype(np.float16), (groups, outputs)
        found[f"{stem}.g_idx"] = int32, (inputs,)
      else:
        packed = (outputs, -(-inputs // _PACKED))
        found[f"{stem}.weight_packed"] = int32, packed
        found[f"{stem}.weight_shape"] = np.dtype(np.int64), (2,)
        found[f"{stem}.weight_scale"] = scale, (outputs, groups)
    return found

  def config(self, others: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns the field `quantization_config` of config.json.

    `others` are the shapes of the tensors without quantization.
    """
    kept = (
      name.removesuffix(_WEIGHT)
      for name, shape in others.items()
      if len(shape) == 2 and name.endswith(_WEIGHT) and "embed" not in name
    )
    ignored = sorted({"lm_head", *kept})
    if self.kind == GPTQ:
      # Loaders leave out layers after "-:", besides those outside of blocks.
      return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": 4,
        "group_size": -1 if self.group is None else self.group,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "dynamic": {f"-:^{re.escape(each)}$": {} for each in ignored},
      }
    weights = {
      "num_bits": 4,
      "type": "int",
      "symmetric": True,
      "strategy": "channel" if self.group is None else "group",
    }
    if self.group is not None:
      weights["group_size"] = self.group
    one = {
      "targets": ["Linear"],
      "weights": weights,
      "input_activations": None,
    }
    return {
      "quant_method": "compressed-tensors",
      "format": "pack-quantized",
      "quantization_status": "compressed",
      "config_groups": {"group_0": one},
      "ignore": ignored,
    }


def make_plan(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  names: mapping.Names,
  *,
  kind: str,
) -> Plan | None:
  """Returns the quantized tensors of a checkpoint; None if it has none.

  Raises:
    user_error.UserError: The format cannot store such weights.
  """
  stored = checkpoint.variables()
  kernels = {
    parameter: name
    for name in stored
    if (parameter := served_einsum.stored_parameter(name)) is not None
  }
  if not kernels:
    return None
  name = checkpoint.run_path.name
  recipe = recipes.find_recipe(name)
  _check_recipe(name, recipe, stored, kind)
  tensors, sizes = {}, set()
  for parameter, values in kernels.items():
    leaf = names.leaves.get(parameter)
    if leaf is None:
      raise user_error.UserError(
        f"{parameter} is in the checkpoint {os.fspath(checkpoint.path)} but not"
        " in the model of config.json."
      )
    scale = stored[values.removesuffix("values") + "scale"]
    for tensor, _ in leaf.sources:
      _check_tensor(tensor, kernels, kind)
      outputs, inputs = tensor.shape
      tensors[tensor.name] = outputs, inputs
      if recipe.rhs is not None and recipe.rhs.block is not None:
        groups = math.prod(leaf.shape) // math.prod(scale.shape)
        sizes.add(groups)
  return Plan(
    kernels=kernels,
    group=math.gcd(*sizes) if sizes else None,
    tensors=tensors,
    kind=kind,
  )


def _check_recipe(
  name: str, recipe: recipe_lib.Recipe, stored: Mapping[str, Any], kind: str
) -> None:
  if recipe.has_zero_points:
    raise user_error.UserError(
      f"{name} has zero points that are not integers, which {kind} does not"
      " store; export int4_group or int4_gptq weights."
    )
  if any(each.endswith("/inputs") for each in stored):
    raise user_error.UserError(
      f"{name} has factors of inputs, which {kind} does not store; export"
      " int4_group or int4_gptq weights."
    )
  assert recipe.rhs is not None
  if recipe.rhs.format is not number_formats.INT4 or recipe.lhs is not None:
    # Packages round activations in other ways, so logits would differ.
    raise user_error.UserError(
      f"{name} is not a recipe of int4 weights with unquantized activations;"
      " export int4_group or int4_gptq weights."
    )


def _check_tensor(
  tensor: mapping.Tensor, kernels: Mapping[str, str], kind: str
) -> None:
  parts = {part.leaf for part in tensor.slices}
  if (
    len(tensor.shape) != 2
    or not tensor.name.endswith(_WEIGHT)
    or re.search(r"\bexperts\b", tensor.name)
    or not parts <= kernels.keys()
  ):
    raise user_error.UserError(
      f"The tensor {tensor.name} is not the weight of one linear layer with all"
      f" its parts quantized, so {kind} cannot store it."
    )
  if kind == GPTQ and any(size % _PACKED for size in tensor.shape):
    raise user_error.UserError(
      f"The tensor {tensor.name} has the shape {list(tensor.shape)}; gptq packs"
      f" {_PACKED} inputs and {_PACKED} outputs into a number, so both must be"
      f" multiples of {_PACKED}; use --format={COMPRESSED}."
    )


def add_config(folder: epath.Path, quantization: Mapping[str, Any]) -> None:
  """Adds the field `quantization_config` to the config.json of a folder."""
  path = folder / "config.json"
  config = json.loads(path.read_text())
  config["quantization_config"] = quantization
  path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def tensors(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  names: mapping.Names,
  plan: Plan,
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the tensors of quantized layers; memory holds those of a kernel."""
  # Values and scales of tensors, and the number of values that are missing.
  open_: dict[str, tuple[np.ndarray, np.ndarray, int]] = {}
  for parameter in plan.kernels:
    leaf = names.leaves[parameter]
    values, scale = _read(checkpoint, leaf, plan)
    for of_values, of_scale in zip(
      leaf.to_tensors(values), leaf.to_tensors(scale), strict=True
    ):
      name, start, rows, columns = of_values
      shape = plan.tensors[name]
      empty = np.zeros(shape, np.int8), np.zeros(shape, np.float32)
      all_values, all_scales, missing = open_.pop(name, (*empty, shape[0]))
      place = slice(start, start + len(rows)), columns
      all_values[place], all_scales[place] = rows, of_scale[2]
      missing -= len(rows)
      if missing:
        open_[name] = all_values, all_scales, missing
      else:
        yield from _encode(name, all_values, all_scales, plan)


def _read(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  leaf: mapping.Leaf,
  plan: Plan,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns values int8 and scales float32, both of the shape of a kernel."""
  of_values = plan.kernels[leaf.name]
  of_scale = of_values.removesuffix("values") + "scale"
  arrays = stored_checkpoint.read_numpy(checkpoint, [of_values, of_scale])
  values, scale = arrays[of_values], arrays[of_scale]
  for axis, size in enumerate(leaf.shape):
    if values.shape[axis] != size:
      values = np.asarray(number_formats.unpack(jnp.asarray(values), axis=axis))
  for axis, size in enumerate(leaf.shape):
    scale = np.repeat(scale, size // scale.shape[axis], axis)
  return values, scale


def _encode(
  name: str, values: np.ndarray, scale: np.ndarray, plan: Plan
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the tensors of a linear layer.

  Args:
    name: Name of the tensor of its weight.
    values: int8 [outputs, inputs].
    scale: float32 [outputs, inputs].
    plan: The export.

  Raises:
    user_error.UserError: A group has several scales, because the layer stores
      its inputs first.
  """
  outputs, inputs = values.shape
  group = inputs if plan.group is None else plan.group
  grouped = scale.reshape(outputs, inputs // group, group)
  if np.any(grouped != grouped[:, :, :1]):
    raise user_error.UserError(
      f"The tensor {name} is stored as [inputs, outputs], so {plan.kind}"
      " cannot store it."
    )
  scales = grouped[:, :, 0]
  stem = name.removesuffix(_WEIGHT)
  nibbles = (values.astype(np.int32) + 8).astype(np.uint32)
  nibbles = np.pad(nibbles, ((0, 0), (0, -inputs % _PACKED)))
  nibbles = nibbles.reshape(outputs, -1, _PACKED)
  shifts = np.arange(_PACKED, dtype=np.uint32) * 4
  packed = np.bitwise_or.reduce(nibbles << shifts, axis=-1).view(np.int32)
  if plan.kind == GPTQ:
    yield f"{stem}.scales", _to_float16(name, scales.T)
    yield f"{stem}.qweight", np.ascontiguousarray(packed.T)
    zeros = scales.shape[1], outputs // _PACKED
    yield f"{stem}.qzeros", np.full(zeros, _STORED_ZEROS, np.int32)
    yield f"{stem}.g_idx", np.arange(inputs, dtype=np.int32) // group
    return
  yield f"{stem}.weight_scale", scales
  yield f"{stem}.weight_packed", packed
  yield f"{stem}.weight_shape", np.array([outputs, inputs], np.int64)


def _to_float16(name: str, scales: np.ndarray) -> np.ndarray:
  """Returns scales as loaders of `gptq` read them.

  Raises:
    user_error.UserError: One is out of range.
  """
  limits = np.finfo(np.float16)
  wrong = scales[(scales > limits.max) | (scales < limits.tiny) & (scales != 0)]
  if wrong.size:
    raise user_error.UserError(
      f"The tensor {name} has the scale {wrong[0]:g}, and those of gptq are"
      f" float16, from {limits.tiny:g} to {limits.max:g}; use"
      f" --format={COMPRESSED}."
    )
  return np.ascontiguousarray(scales.astype(np.float16))
