"""Linear layers of Hugging Face models, as PEFT names and adapts them.

A layer is a matrix [outputs, inputs] of the Hugging Face model; its parts are
the kernels of Paxon that hold it. A layer may have several parts: projections
that share a tensor, and experts. The experts of a mixture are one layer with a
matrix for each expert, a parameter of the module `experts`; some files have
tensors for each expert instead, which are layers, too.
"""

from collections.abc import Iterator
import dataclasses
import functools
import math
import re
from typing import Final

import numpy as np

from paxon.layers.models.hugging_face import mapping

_WEIGHT = ".weight"
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.\w+\.weight")
# The module of a mixture of experts in files, and in transformers from 5 on.
_RENAMED: Final = (".block_sparse_moe.", ".mlp.")
# Parameters of the module of all experts, in its order, and their kernels.
FUSED: Final = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """The share of a kernel in a layer.

  Attributes:
    kernel: Name of the variable.
    index: Entry along its axes of layers and experts.
    outputs: The output of the layer [*outputs] of each output of the kernel.
    inputs: The input of the layer [*inputs] of each input of the kernel.
    has_inputs_first: Whether the kernel is [*inputs, *outputs].
    expert: Number of the expert in the layer.
  """

  kernel: str
  index: tuple[int, ...]
  outputs: np.ndarray
  inputs: np.ndarray
  has_inputs_first: bool
  expert: int = 0

  def to_kernel(self, matrix: np.ndarray) -> np.ndarray:
    """Returns the values of a matrix [outputs, inputs] in the kernel."""
    if self.has_inputs_first:
      return matrix.T[self.inputs[..., *_new(self.outputs)], self.outputs]
    return matrix[self.outputs[..., *_new(self.inputs)], self.inputs]

  def to_matrix(self, kernel: np.ndarray) -> np.ndarray:
    """Returns an entry of the kernel as [outputs, inputs] of the part alone."""
    if self.has_inputs_first:
      return kernel.reshape(self.inputs.size, self.outputs.size).T
    return kernel.reshape(self.outputs.size, self.inputs.size)


def _new(array: np.ndarray) -> tuple[None, ...]:
  return (None,) * array.ndim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """A linear layer.

  Attributes:
    name: Path of the module, or of the parameter of all experts.
    parts: Its kernels.
    num_outputs: Outputs.
    num_inputs: Inputs.
    num_experts: Matrices; 0 for a module with one.
  """

  name: str
  parts: tuple[Part, ...]
  num_outputs: int
  num_inputs: int
  num_experts: int = 0


def find_layers(
  names: mapping.Names, *, embeddings: frozenset[str] = frozenset()
) -> dict[str, Layer]:
  """Returns the layers of a model by name.

  Args:
    names: Both names of its weights.
    embeddings: Names of layers that look up rows, whose inputs are rows.
  """
  found = {}
  experts: dict[str, dict[int, dict[str, Part]]] = {}
  for tensor in names.tensors.values():
    layer = _make_layer(tensor, is_lookup=_module(tensor.name) in embeddings)
    if layer is None:
      continue
    found[layer.name] = layer
    of_expert = _OF_EXPERT.fullmatch(tensor.name)
    if of_expert:
      module = of_expert[1].replace(*_RENAMED)
      (part,) = layer.parts
      kernel = part.kernel.rpartition("/")[2]
      experts.setdefault(module, {}).setdefault(int(of_expert[2]), {})[
        kernel
      ] = part
  for module, kernels in experts.items():
    for layer in _fuse(module, kernels):
      found[layer.name] = layer
  return found


def _fuse(module: str, kernels: dict[int, dict[str, Part]]) -> Iterator[Layer]:
  """Yields the layers of all experts."""
  for name, projections in FUSED.items():
    parts = []
    num_outputs = num_inputs = 0
    for expert, by_name in kernels.items():
      num_outputs = 0
      for projection in projections:
        part = by_name[projection]
        parts.append(
          dataclasses.replace(
            part, outputs=part.outputs + num_outputs, expert=expert
          )
        )
        num_outputs += part.outputs.size
        num_inputs = part.inputs.size
    yield Layer(
      name=f"{module}.{name}",
      parts=tuple(parts),
      num_outputs=num_outputs,
      num_inputs=num_inputs,
      num_experts=len(kernels),
    )


def _make_layer(tensor: mapping.Tensor, *, is_lookup: bool) -> Layer | None:
  """Returns the layer of a tensor; None if it is no matrix."""
  first = tensor.slices[0]
  count = len(mapping.split_dimensions(first.layout.pattern.split("->")[0]))
  is_stack = count == 3 and "/experts/" in first.leaf
  if count != 2 and not is_stack:
    return None
  num_experts = tensor.shape[0] if is_stack else 0
  parts: list[Part] = []
  sizes = tensor.shape[-2:]
  for each in tensor.slices:
    layout = each.layout
    made = _find_indices(layout.pattern, tuple(layout.sizes.items()), is_stack)
    rows = made.rows if is_stack else made.rows + each.start
    # `Conv1D` of GPT-2, embeddings and the stacks of gpt-oss have a row for
    # each input; a table with a row for each output is a head.
    is_conv = made.has_rows_first and not each.leaf.endswith("/table")
    if is_lookup or is_stack or is_conv:
      inputs, outputs, has_inputs_first = (
        rows,
        made.columns,
        made.has_rows_first,
      )
    else:
      inputs, outputs, has_inputs_first = (
        made.columns,
        rows,
        not made.has_rows_first,
      )
      sizes = tensor.shape[::-1]
    part = Part(
      kernel=each.leaf,
      index=each.index,
      outputs=outputs,
      inputs=inputs,
      has_inputs_first=has_inputs_first,
    )
    parts += [
      dataclasses.replace(part, index=(*each.index, e), expert=e)
      for e in range(num_experts)
    ] or [part]
  return Layer(
    name=_module(tensor.name),
    parts=tuple(parts),
    num_inputs=sizes[0],
    num_outputs=sizes[1],
    num_experts=num_experts,
  )


def _module(tensor: str) -> str:
  return tensor.removesuffix(_WEIGHT)


@dataclasses.dataclass(frozen=True)
class _Indices:
  """Rows and columns of a tensor that a variable holds, in its dimensions."""

  rows: np.ndarray
  columns: np.ndarray
  has_rows_first: bool


@functools.lru_cache(maxsize=256)
def _find_indices(
  pattern: str, sizes: tuple[tuple[str, int], ...], is_stack: bool
) -> _Indices:
  left, _, right = pattern.partition("->")
  terms = mapping.split_dimensions(left)
  letters = [set(re.findall(r"[A-Za-z_]\w*", " ".join(t))) for t in terms]
  groups = mapping.split_dimensions(right)[int(is_stack) :]
  of = dict(sizes)
  found = []
  for which in (-2, -1):
    hidden = set().union(*letters) - letters[which]
    # Other dimensions have one entry.
    cut = mapping.Layout(
      pattern, {k: 1 if k in hidden else n for k, n in sizes}
    )
    shape = cut.tensor_shape
    along = np.arange(shape[which])
    along = along[:, None] if which == -2 else along
    index = cut.to_variable(np.broadcast_to(along, shape))
    mine = [each for each in groups if each[0] in letters[which]]
    shape = [math.prod(of[name] for name in each) for each in mine]
    found.append(index.reshape(shape))
  rows, columns = found
  return _Indices(rows, columns, groups[0][0] in letters[-2])
