"""Frozen kernels that are stored quantized, and dequantized for matmuls.

  nf4     4-bit NormalFloat with double quantization, as in bitsandbytes
  int8    with a scale for each output
  int4    the same, with the range of smallest error
  fp8     e4m3 with a scale for each output

NF4 (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314): the weights of a
kernel, outputs first, are split into blocks of 64. A weight is the index of the
nearest value of `number_formats.NF4` times the largest magnitude of its block.
The magnitudes, less their mean, are quantized again, in blocks of 256, to 8
bits of dynamic tree quantization (https://arxiv.org/abs/2110.02861). A weight
then has 4.127 bits.

A kernel `params/<layer>/<matmul>` is stored as

  stored/<layer>/einsum/<matmul>/values            nf4, int4: two in a byte
  stored/<layer>/einsum/<matmul>/scale             of all but nf4
  stored/<layer>/einsum/<matmul>/block_values      uint8 [blocks]
  stored/<layer>/einsum/<matmul>/block_scale       float32 [blocks of blocks]
  stored/<layer>/einsum/<matmul>/block_mean        float32

The variables of blocks have no logical axes: every device has all of them.
The kernel itself is absent from the state; it is quantized when a checkpoint is
imported (`Origin.quantize`).
"""

from collections.abc import Mapping, Sequence
import dataclasses
import enum
import functools
import math
from typing import Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from paxon.quantization import (
  equations,
  number_formats,
  quantized_array,
  served_einsum,
)
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import variables

COLLECTION: Final = "stored"
BLOCK_SIZE: Final = 64
BLOCKS_SIZE: Final = 256
_VALUES, _SCALE = "values", "scale"
_BLOCK_VALUES, _BLOCK_SCALE = "block_values", "block_scale"
_BLOCK_MEAN = "block_mean"
_PARAMS = "params"
_TINY = 1e-38

Fields = Mapping[str, jax.Array]


class Storage(enum.Enum):
  """The format of stored kernels."""

  NF4 = "nf4"
  INT8 = "int8"
  INT4 = "int4"
  FP8 = "fp8"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredKernel:
  """A kernel as it is stored.

  Attributes:
    fields: Fields of `quantize`.
    storage: Format.
    shape: Shape of the kernel.
    inputs: Axes of its inputs.
  """

  fields: Fields
  storage: Storage = dataclasses.field(metadata={"static": True})
  shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
  inputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})

  def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns the kernel; it has no gradient."""
    return dequantize(
      jax.lax.stop_gradient(self.fields),
      self.storage,
      shape=self.shape,
      inputs=self.inputs,
      dtype=dtype,
    )


_FORMATS = {
  Storage.INT8: number_formats.INT8,
  Storage.INT4: number_formats.INT4,
  Storage.FP8: number_formats.FP8_E4M3,
}


@dataclasses.dataclass(frozen=True)
class Origin:
  """The kernel that a stored variable comes from; its initializer.

  Attributes:
    storage: Format.
    inputs: Axes of the kernel's inputs.
    field: Which of the fields of `quantize` the variable is.
  """

  storage: Storage
  inputs: tuple[int, ...]
  field: str

  def __call__(
    self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike
  ) -> jax.Array:
    """Returns zeros: the value is that of a kernel."""
    del key
    return jnp.zeros(shape, dtype)

  def quantize(self, kernel: jax.Array, *, num_stacked: int) -> Fields:
    """Returns all fields of a kernel with leading axes of stacks."""
    lead, rest = kernel.shape[:num_stacked], kernel.shape[num_stacked:]
    # Layer by layer, because a float32 copy of all may not fit.
    found = jax.lax.map(
      lambda one: quantize(one, self.storage, inputs=self.inputs),
      kernel.reshape(-1, *rest),
    )
    return {k: x.reshape(*lead, *x.shape[1:]) for k, x in found.items()}

  def dequantize(
    self, fields: Fields, *, shape: tuple[int, ...], num_stacked: int
  ) -> jax.Array:
    """Returns kernels of layers of this shape, with leading axes of stacks."""
    lead = fields[_VALUES].shape[:num_stacked]
    found = jax.lax.map(
      lambda one: dequantize(
        one, self.storage, shape=shape, inputs=self.inputs
      ),
      {k: x.reshape(-1, *x.shape[num_stacked:]) for k, x in fields.items()},
    )
    return found.reshape(*lead, *shape)


def find_parameter(name: str) -> str | None:
  """Returns the parameter, such as `params/a/gate`, of a stored variable.

  Args:
    name: Logical name, such as `stored/a/einsum/gate/values`.

  Returns:
    None for other variables.
  """
  collection, *path = name.split("/")
  if collection != COLLECTION:
    return None
  *layer, _, matmul, _ = path
  return "/".join((_PARAMS, *layer, matmul))


def quantize(
  kernel: jax.Array, storage: Storage, *, inputs: Sequence[int]
) -> dict[str, jax.Array]:
  """Returns the stored fields of the kernel of one layer.

  Args:
    kernel: Of a floating-point dtype.
    storage: Format.
    inputs: Its axes that a matmul contracts.
  """
  wide = kernel.astype(jnp.float32)
  if storage is Storage.NF4:
    return _quantize_nf4(wide, inputs)
  is_searched = storage is Storage.INT4
  call = served_einsum.search_scale if is_searched else quantized_array.quantize
  tensor_recipe = recipe_lib.TensorRecipe(
    _FORMATS[storage], granularity=recipe_lib.Granularity.CHANNEL
  )
  made = call(wide, tensor_recipe, contracted=tuple(inputs))
  axis = served_einsum.packed_axis(_FORMATS[storage], kernel.shape)
  made = made if axis is None else made.pack(axis)
  return {_VALUES: made.values, _SCALE: made.scale}


def dequantize(
  fields: Fields,
  storage: Storage,
  *,
  shape: tuple[int, ...],
  inputs: Sequence[int],
  dtype: DTypeLike = jnp.float32,
) -> jax.Array:
  """Returns the kernel of one layer; the arguments are those of `quantize`."""
  if storage is not Storage.NF4:
    whole = served_einsum.dequantize(
      fields[_VALUES],
      fields[_SCALE],
      number_format=_FORMATS[storage],
      layer_shape=shape,
    )
    return whole.astype(dtype)
  codes = fields[_VALUES]
  axis = served_einsum.packed_axis(number_formats.INT4, shape)
  if axis is not None:
    codes = number_formats.unpack(codes, axis=axis)
  values = _look_up(np.asarray(number_formats.NF4.table, np.float32), codes + 8)
  largest = _look_up(make_dynamic_table(), fields[_BLOCK_VALUES])
  count = largest.size
  largest = largest * jnp.repeat(fields[_BLOCK_SCALE], BLOCKS_SIZE)[:count]
  largest = largest + fields[_BLOCK_MEAN]
  order = _outputs_first(shape, inputs)
  scale = jnp.repeat(largest, BLOCK_SIZE)[: math.prod(shape)]
  scale = scale.reshape([shape[i] for i in order])
  return (values * scale.transpose(np.argsort(order))).astype(dtype)


@functools.cache
def make_dynamic_table() -> np.ndarray:
  """Returns the 256 values of dynamic tree quantization, increasing, float32.

  With e from 0 to 6, the middles of 2^e equal parts of [0.1, 1], times
  10^(e - 6), with both signs; and 0 and 1.
  """
  found = [0.0, 1.0]
  for exponent in range(7):
    edges = np.linspace(0.1, 1, 2**exponent + 1)
    middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)
    found += [*middles, *-middles]
  return np.sort(np.asarray(found, np.float32))


def find_stored(
  module: nn.Module,
  storage: Storage,
  equation: equations.Equation,
  kernel: jax.Array,
  *,
  names: Sequence[str | None] | None,
) -> StoredKernel | None:
  """Returns the stored kernel of a module, which creates it if initializing.

  Args:
    module: Owner of the variables.
    storage: Format.
    equation: Equation of the matmul.
    kernel: Right operand.
    names: Logical axes of the kernel; None if it is no parameter.

  Returns:
    None if nothing is stored.
  """
  inputs = equation.contracted_axes(equation.rhs)
  if module.is_initializing() and names is not None:
    for field, value in quantize(kernel, storage, inputs=inputs).items():
      axes: Sequence[str | None] = (None,) * value.ndim
      if value.ndim == kernel.ndim:
        sizes = zip(names, value.shape, strict=True)
        axes = [name if size > 1 else None for name, size in sizes]
      box = variables.make_boxed_init(
        Origin(storage, inputs, field),
        axes,
        shape=value.shape,
        dtype=value.dtype,
        update=variables.UpdateRule.OPTIMIZER,
      )()
      box = box.replace(value=value, trainable=False)
      module.put_variable(COLLECTION, field, box)
  if not module.has_variable(COLLECTION, _VALUES):
    return None
  fields = variables.unbox(dict(module.variables[COLLECTION]))
  return StoredKernel(
    fields=fields, storage=storage, shape=kernel.shape, inputs=inputs
  )


def multiply(
  equation: equations.Equation,
  lhs: jax.Array,
  kernel: StoredKernel,
  *,
  preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
  """Returns the matmul of activations and a stored kernel.

  The kernel is dequantized to the dtype of `lhs`, again in the backward pass,
  which has a gradient of `lhs` only.
  """

  def compute(lhs: jax.Array, kernel: StoredKernel) -> jax.Array:
    return jnp.einsum(
      equation.text,
      lhs,
      kernel.dequantize(lhs.dtype),
      preferred_element_type=preferred_element_type,
    )

  return jax.checkpoint(compute)(lhs, kernel)


def _quantize_nf4(
  kernel: jax.Array, inputs: Sequence[int]
) -> dict[str, jax.Array]:
  order = _outputs_first(kernel.shape, inputs)
  blocks = _to_blocks(kernel.transpose(order).reshape(-1), BLOCK_SIZE)
  largest = jnp.max(jnp.abs(blocks), axis=1)
  scaled = blocks * (1 / jnp.maximum(largest, _TINY))[:, None]
  codes = _find_nearest(
    np.asarray(number_formats.NF4.table, np.float32), scaled
  ).reshape(-1)
  codes = codes[: kernel.size].reshape([kernel.shape[i] for i in order])
  values = (codes - 8).astype(jnp.int8).transpose(np.argsort(order))
  axis = served_einsum.packed_axis(number_formats.INT4, kernel.shape)
  if axis is not None:
    values = number_formats.pack(values, axis=axis)
  mean = jnp.mean(largest)
  rest = _to_blocks(largest - mean, BLOCKS_SIZE)
  scale = jnp.max(jnp.abs(rest), axis=1)
  rest = rest / jnp.maximum(scale, _TINY)[:, None]
  found = _find_nearest(make_dynamic_table(), rest).reshape(-1)
  return {
    _VALUES: values,
    _BLOCK_VALUES: found[: largest.size].astype(jnp.uint8),
    _BLOCK_SCALE: scale,
    _BLOCK_MEAN: mean,
  }


def _outputs_first(
  shape: tuple[int, ...], inputs: Sequence[int]
) -> tuple[int, ...]:
  """Returns the axes of a kernel, as in torch's [outputs, inputs]."""
  outputs = [axis for axis in range(len(shape)) if axis not in inputs]
  return (*outputs, *inputs)


def _to_blocks(flat: jax.Array, size: int) -> jax.Array:
  """Returns [blocks, size]; the last block is padded with zeros."""
  return jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def _find_nearest(table: np.ndarray, x: jax.Array) -> jax.Array:
  """Returns the indices of the nearest values, the smaller one in a tie."""
  return jnp.searchsorted(jnp.asarray((table[1:] + table[:-1]) / 2), x)


def _look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
  return jnp.asarray(table).at[index].get(mode="promise_in_bounds")
