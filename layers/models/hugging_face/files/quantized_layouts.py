"""Readers of quantized weights: several tensors of a file as one of values.

For the weight `NAME.weight` [R,C] of R outputs and C inputs, with B bits, and
for G groups of inputs with a scale each:

  GPTQ            qweight int32 [C*B/32,R], qzeros int32 [G,R*B/32],
                  scales [G,R], g_idx int32 [C] (the group of each input; may
                  be missing)
  AWQ (gemm)      qweight int32 [C,R/8], qzeros int32 [G,R/8], scales [G,R];
                  eight outputs of an int32 in the order of `_AWQ_ORDER`
  AWQ (gemv)      qweight int32 [R,C/8], qzeros int32 [R,>=G/8],
                  scales [R,>=G]
  pack-quantized  weight_packed int32 [R,C*B/32], weight_scale [R,G],
                  weight_shape [2], weight_zero_point int32 [R*B/32,G] or int8
                  [R,G], weight_g_idx int32 [C]; the last two may be missing
  fp8, int8       weight [R,C], weight_scale or weight_scale_inv [1], [R,1],
                  [R,G] or of blocks; weight_zero_point may be there
  bitsandbytes    in 4 bits: weight uint8 [R*C/2,1], weight.absmax of blocks of
                  flat values, weight.quant_map [16], the JSON
                  weight.quant_state.bitsandbytes__nf4, and weight.nested_*
                  where absmax is quantized, too; in 8 bits: weight int8 [R,C],
                  SCB [R], the largest magnitudes of rows
  MXFP4           see `from_mxfp4`

Values of B bits in an int32 begin with its lowest bits, and may begin in one
and end in the next. `(value - zero point) * scale` is computed in float32.
Formats: AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors, bitsandbytes,
DeepSeek-V3 (arXiv:2412.19437), OCP Microscaling.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from paxon.layers.models.hugging_face.files import (
  quantized_config,
  quantized_parts,
)

Form = quantized_config.Form
Layout = quantized_parts.Layout
Parts = quantized_parts.Parts
Shape = quantized_parts.Shape
Weight = quantized_parts.Weight

FP8: Final = "F8_E4M3"
INT8: Final = "I8"
# The start of the name of a JSON object of bitsandbytes.
QUANT_STATE: Final = ".weight.quant_state.bitsandbytes__"
# Where an int32 of AWQ (gemm) has each of its eight outputs.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Values of a block of MXFP4, which share a scale.
_BLOCK = 32
# Values of the bits of E2M1; the highest bit is the sign.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_E2M1, -_E2M1])
# The factor of bitsandbytes, about 1/127.
_INT8_FACTOR = np.float32(7.874015718698502e-3)
_FLOATS = ("F32", "BF16", "F16")
# Dtypes of tensors by the ends of their names; of others, `FLOATS`.
_DTYPES: Mapping[str, tuple[str, ...]] = {
  ".g_idx": ("I32", "I64"),
  ".qweight": ("I32",),
  ".qzeros": ("I32",),
  ".weight": (FP8, INT8, "U8", *_FLOATS),
  ".weight.absmax": ("U8", *_FLOATS),
  ".weight_format": ("U8",),
  ".weight_g_idx": ("I32", "I64"),
  ".weight_packed": ("I32",),
  ".weight_scale": (*_FLOATS, "F8_E8M0", "U8"),
  ".weight_scale_inv": (*_FLOATS, "F8_E8M0", "U8"),
  ".weight_shape": ("I64", "I32"),
  ".weight_zero_point": ("I32", INT8, FP8, *_FLOATS),
  "_blocks": ("U8",),
  "_scales": ("U8",),
}


def _count_words(count: int, bits: int) -> int:
  """Returns the int32 that hold values."""
  return -(-count * bits // 32)


def find_dtypes(end: str) -> tuple[str, ...]:
  """Returns the supported dtypes of a tensor by the end of its name."""
  return ("U8",) if end.startswith(QUANT_STATE) else _DTYPES.get(end, _FLOATS)


def _details_of_packed(weight: Weight) -> dict[str, Any]:
  shape = tuple(map(int, Parts(weight).whole(".weight_shape").flat))
  if len(shape) != 2 or min(shape) <= 0:
    raise weight.make_error(
      ".weight_shape", f"has the values {list(shape)[:8]}, which are no [R,C]"
    )
  return {"shape": shape}


def _details_of_int8(weight: Weight) -> dict[str, Any]:
  parts, end = Parts(weight), ".weight_format"
  if parts.has(end) and (parts.whole(end) != 0).any():
    raise weight.make_error(end, "is not 0; only the format `row` is supported")
  return {}


def _details_of_blocks(weight: Weight) -> dict[str, Any]:
  """Reads the JSON object of bitsandbytes; raises QuantizedWeightsError."""
  parts, end = Parts(weight), f"{QUANT_STATE}nf4"
  needed = ["blocksize"]
  if parts.has(".weight.nested_absmax"):
    needed.append("nested_blocksize")
    if not parts.has(".weight.nested_quant_map"):
      name = f"{weight.stem}.weight.nested_quant_map"
      raise weight.make_error(".weight.nested_absmax", f"has no {name}")
  elif weight.entry(".weight.absmax").dtype == "U8":
    name = f"{weight.stem}.weight.nested_absmax"
    raise weight.make_error(".weight.absmax", f"is quantized and has no {name}")
  try:
    text = parts.bytes(end, 0, math.prod(weight.entry(end).shape)).tobytes()
    found = json.loads(text)
    sizes = [*found["shape"], *(found[name] for name in needed)]
    if len(found["shape"]) != 2 or not all(
      type(each) is int and each > 0 for each in sizes
    ):
      raise ValueError(f"sizes {sizes}")
    offset = found.get("nested_offset", 0)
    if not isinstance(offset, int | float):
      raise ValueError(f"nested_offset {offset!r}")
    return {
      **{name: found[name] for name in needed},
      "shape": tuple(found["shape"]),
      "offset": np.float32(offset),
    }
  except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
    raise weight.make_error(
      end, f"does not describe a quantized weight ({error!r})"[:300]
    ) from error


def _check_matrices(weight: Weight, *ends: str) -> None:
  """Raises QuantizedWeightsError unless tensors have two dimensions."""
  for end in ends:
    if len(weight.entry(end).shape) != 2:
      shown = quantized_parts.show(weight.entry(end).shape)
      raise weight.make_error(end, f"has shape {shown}; it must be a matrix")


def _shape_of_gptq(weight: Weight, shape: Shape | None) -> Shape:
  _check_matrices(weight, ".qweight", ".scales")
  if shape is not None:
    return shape
  outputs = weight.entry(".scales").shape[-1]
  if ".g_idx" in weight.parts:
    return outputs, math.prod(weight.entry(".g_idx").shape)
  words = weight.entry(".qweight").shape[0]
  is_packed = weight.storage.form is Form.GPTQ
  return outputs, words * 32 // weight.storage.bits if is_packed else words


def _shapes_of_gptq(weight: Weight) -> dict[str, tuple[Shape, ...]]:
  (outputs, inputs), bits = weight.shape, weight.storage.bits
  groups, packed = (
    quantized_parts.find_grid(weight).shape[1],
    _count_words(outputs, bits),
  )
  is_gptq = weight.storage.form is Form.GPTQ
  rows = (_count_words(inputs, bits), outputs) if is_gptq else (inputs, packed)
  return {
    ".qweight": (rows,),
    ".qzeros": ((groups, packed),),
    ".scales": ((groups, outputs),),
    ".g_idx": ((inputs,),),
  }


def _shape_of_gemv(weight: Weight, shape: Shape | None) -> Shape:
  _check_matrices(weight, ".qweight")
  outputs, words = weight.entry(".qweight").shape
  return shape or (outputs, words * 8)


def _shapes_of_gemv(weight: Weight) -> dict[str, tuple[Shape, ...]]:
  outputs, inputs = weight.shape
  groups = quantized_parts.find_grid(weight).shape[1]
  # Zero points of a row fill multiples of one, two or four int32.
  widths = [-(-groups // (8 * each)) * each for each in (1, 2, 4)]
  return {
    ".qweight": ((outputs, inputs // 8),),
    ".qzeros": tuple((outputs, width) for width in widths),
    ".scales": tuple((outputs, 8 * width) for width in widths),
  }


def _shapes_of_packed(weight: Weight) -> dict[str, tuple[Shape, ...]]:
  (outputs, inputs), bits = weight.shape, weight.storage.bits
  grid, each = quantized_parts.find_grid(weight), 32 // bits
  zeros = [
    (rows, grid.shape[1])
    for rows in (_count_words(outputs, bits), -(-outputs // each))
  ]
  point = weight.parts.get(".weight_zero_point")
  if point is not None and point[1][1].dtype != "I32":
    zeros = [*quantized_parts.shapes_of_scales(grid)]
  return {
    # Old versions do not split a value.
    ".weight_packed": (
      (outputs, _count_words(inputs, bits)),
      (outputs, -(-inputs // each)),
    ),
    ".weight_scale": quantized_parts.shapes_of_scales(grid),
    ".weight_zero_point": tuple(zeros),
    ".weight_g_idx": ((inputs,),),
  }


def _shapes_of_values(weight: Weight) -> dict[str, tuple[Shape, ...]]:
  grid = quantized_parts.find_grid(weight)
  scales = quantized_parts.shapes_of_scales(grid)
  return {
    ".weight_scale_inv": scales,
    ".weight_scale": scales,
    ".weight_zero_point": scales,
    ".weight_g_idx": (weight.shape[1:],),
    ".SCB": (weight.shape[:1],),
  }


def _shapes_of_blocks(weight: Weight) -> dict[str, tuple[Shape, ...]]:
  """The shapes of bitsandbytes in 4 bits."""
  details = weight.details
  count = math.prod(weight.shape)
  stored = -(-count // 2) // weight.entry(".weight").numpy_dtype.itemsize
  blocks = -(-count // details["blocksize"])
  nested = -(-blocks // details.get("nested_blocksize", blocks))
  return {
    ".weight.absmax": ((blocks,),),
    ".weight": ((stored, 1), (1, stored)),
    ".weight.quant_map": ((16,),),
    ".weight.nested_absmax": ((nested,),),
    ".weight.nested_quant_map": ((256,),),
  }


def _shape_of_values(weight: Weight, shape: Shape | None) -> Shape:
  del shape
  _check_matrices(weight, ".weight")
  return weight.entry(".weight").shape


def _shape_of_mxfp4(weight: Weight, shape: Shape | None) -> Shape:
  del shape
  blocks, scales = (weight.entry(x).shape for x in ("_blocks", "_scales"))
  if len(blocks) != 4 or blocks != (*scales, _BLOCK // 2):
    raise weight.make_error(
      "_blocks",
      f"has shape {quantized_parts.show(blocks)} and"
      f" {weight.parts['_scales'][0]} {quantized_parts.show(scales)}; they must"
      " be [E,R,G,16] and [E,R,G]",
    )
  return blocks[0], blocks[2] * _BLOCK, blocks[1]


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
  """Returns values of some bits, without sign, along the first axis.

  Args:
    words: int32 [W,...]. Values begin with the lowest bits of the first.
    bits: Of a value.
    count: Number of values.

  Returns:
    uint32 [count,...].
  """
  words = words.view(np.uint32)
  if 32 % bits == 0:
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = words[:, None] >> shifts.reshape(-1, *([1] * (words.ndim - 1)))
    values &= np.uint32((1 << bits) - 1)
    return values.reshape(-1, *words.shape[1:])[:count]
  at = np.arange(count, dtype=np.int64) * bits
  word, shift = at // 32, (at % 32).astype(np.uint32)
  values = words[word] >> _expand(shift, words.ndim)
  # Those that end in the next word.
  split = np.flatnonzero(shift + bits > 32)
  rest = words[word[split] + 1] << _expand(32 - shift[split], words.ndim)
  values[split] |= rest
  return values & np.uint32((1 << bits) - 1)


def _expand(x: np.ndarray, ndim: int) -> np.ndarray:
  return x.reshape(-1, *([1] * (ndim - 1)))


def _unpack_padded(words: np.ndarray, bits: int, count: int) -> np.ndarray:
  """The same for words that may end with unused bits instead of a part."""
  each = 32 // bits
  if len(words) == _count_words(count, bits):
    return unpack(words, bits, count)
  values = np.stack(
    [unpack(words[i : i + 1], bits, each) for i in range(len(words))]
  )
  return values.reshape(-1, *words.shape[1:])[:count]


def _unpack_awq(words: np.ndarray) -> np.ndarray:
  """Returns outputs in order, [R,...], from int32 [R/8,...] of AWQ."""
  values = unpack(words, 4, 8 * len(words))
  values = values.reshape(-1, 8, *words.shape[1:])[:, list(_AWQ_ORDER)]
  return values.reshape(-1, *words.shape[1:])


def _multiply(
  values: np.ndarray,
  zeros: np.ndarray | None,
  scales: np.ndarray,
  groups: np.ndarray,
) -> np.ndarray:
  """Returns `(values - zeros) * scales`, float32 [R,C].

  Args:
    values: [R,C].
    zeros: Zero points, [R,G] or [1,G], or None.
    scales: [R,G] or [1,G].
    groups: Group of each input, [C].
  """
  result = np.array(values, np.float32, order="C")
  size = -(-len(groups) // scales.shape[1])
  if (groups == np.arange(len(groups)) // size).all() and (
    len(groups) == size * scales.shape[1]
  ):
    # Without a copy of the scales for each input.
    grouped, spread = result.reshape(len(result), -1, size), np.s_[:, :, None]
  else:
    grouped, spread = result, np.s_[:, groups]
  if zeros is not None:
    grouped -= zeros.astype(np.float32)[spread]
  grouped *= _to_float32(scales)[spread]
  return result


def _to_float32(scales: np.ndarray) -> np.ndarray:
  if scales.dtype == np.uint8:
    # Exponents, as those of MXFP8.
    return np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
  return scales.astype(np.float32)


def _decode_gptq(parts: Parts, start: int, stop: int) -> np.ndarray:
  (outputs, inputs), bits = parts.shape, parts.storage.bits
  values = unpack(parts.whole(".qweight")[:, start:stop], bits, inputs).T
  zeros = unpack(parts.whole(".qzeros").T, bits, outputs)[start:stop]
  # The format wraps around.
  zeros = (zeros + parts.storage.zero_offset) & ((1 << bits) - 1)
  scales = parts.whole(".scales").T[start:stop]
  return _multiply(values, zeros, scales, parts.groups(".g_idx"))


def _decode_gemm(parts: Parts, start: int, stop: int) -> np.ndarray:
  first, last = start // 8, -(-stop // 8)
  rows = slice(start - first * 8, stop - first * 8)
  values, zeros = (
    _unpack_awq(parts.whole(end)[:, first:last].T)[rows]
    for end in (".qweight", ".qzeros")
  )
  scales = parts.whole(".scales").T[start:stop]
  return _multiply(values, zeros, scales, parts.groups(".g_idx"))


def _decode_gemv(parts: Parts, start: int, stop: int) -> np.ndarray:
  count = quantized_parts.find_grid(parts.weight).shape[1]
  packed, zeros, scales = (
    parts.rows(end, start, stop) for end in (".qweight", ".qzeros", ".scales")
  )
  return _multiply(
    unpack(packed.T, 4, parts.shape[1]).T,
    unpack(zeros.T, 4, count).T,
    scales[:, :count],
    parts.groups(".g_idx"),
  )


def _decode_packed(parts: Parts, start: int, stop: int) -> np.ndarray:
  (outputs, inputs), bits = parts.shape, parts.storage.bits
  packed = parts.rows(".weight_packed", start, stop)
  zero = np.int32(1 << (bits - 1))
  values = _unpack_padded(packed.T, bits, inputs).T.astype(np.int32) - zero
  zeros = None
  if parts.has(".weight_zero_point"):
    zeros = parts.whole(".weight_zero_point")
    if zeros.dtype == np.int32:
      unpacked = _unpack_padded(zeros, bits, outputs).astype(np.int32)
      zeros = unpacked - zero
    zeros = _take_rows(parts, zeros, start, stop)
  scales = _take_rows(parts, parts.whole(".weight_scale"), start, stop)
  return _multiply(values, zeros, scales, parts.groups(".weight_g_idx"))


def _take_rows(
  parts: Parts, scales: np.ndarray, start: int, stop: int
) -> np.ndarray:
  """Returns the scales, or zero points, of rows, [stop - start,G]."""
  grid = quantized_parts.find_grid(parts.weight)
  rows = np.arange(start, stop) // (grid.block[0] or parts.shape[0])
  return scales.reshape(grid.shape)[rows]


def _decode_values(parts: Parts, start: int, stop: int) -> np.ndarray:
  # Known by the first of both names.
  end = next(x for x in parts.weight.parts if x.startswith(".weight_scale"))
  zeros = None
  if parts.has(".weight_zero_point"):
    zeros = parts.whole(".weight_zero_point")
    zeros = _take_rows(parts, zeros, start, stop)
  return _multiply(
    parts.rows(".weight", start, stop),
    zeros,
    _take_rows(parts, parts.whole(end), start, stop),
    parts.groups(".weight_g_idx"),
  )


def _decode_int8(parts: Parts, start: int, stop: int) -> np.ndarray:
  largest = parts.whole(".SCB")[start:stop, None].astype(np.float32)
  values = parts.rows(".weight", start, stop).astype(np.float32)
  return values * largest * _INT8_FACTOR


def _decode_blocks(parts: Parts, start: int, stop: int) -> np.ndarray:
  """The values of bitsandbytes in 4 bits."""
  details, row = parts.weight.details, math.prod(parts.shape[1:])
  first, last = start * row, stop * row
  pairs = parts.bytes(".weight", first // 2, -(-last // 2))
  values = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(-1)
  values = values[first % 2 :][: last - first]
  blocks = np.arange(first, last) // details["blocksize"]
  absmax = parts.whole(".weight.absmax")
  if parts.has(".weight.nested_absmax"):
    nested = np.arange(len(absmax)) // details["nested_blocksize"]
    factors = parts.whole(".weight.nested_absmax").astype(np.float32)[nested]
    table = parts.whole(".weight.nested_quant_map").astype(np.float32)
    absmax = table[absmax] * factors + details["offset"]
  table = parts.whole(".weight.quant_map").astype(np.float32)
  found = table[values] * absmax.astype(np.float32)[blocks]
  return found.reshape(stop - start, *parts.shape[1:])


def _decode_mxfp4(parts: Parts, start: int, stop: int) -> np.ndarray:
  blocks, scales = (parts.rows(x, start, stop) for x in ("_blocks", "_scales"))
  return from_mxfp4(blocks, scales)


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Returns the values of weights in MXFP4, bfloat16 [E,G*32,R].

  Byte `i` of a block has the values `2 i`, in its low four bits, and `2 i + 1`;
  a value is a float of 4 bits (E2M1) times `2 ** (scale - 127)`, which bfloat16
  represents exactly.

  Args:
    blocks: Two values in each byte, uint8 [E,R,G,16].
    scales: Exponents of the blocks plus 127, uint8 [E,R,G].
  """
  experts, rows, groups, _ = blocks.shape
  result = np.empty((experts, groups * _BLOCK, rows), jnp.bfloat16)
  # One expert at a time, because the float32 values are large.
  for expert, block in enumerate(blocks):
    pairs = [_FP4_VALUES[block & 15], _FP4_VALUES[block >> 4]]
    values = np.stack(pairs, axis=-1).reshape(rows, groups, _BLOCK)
    exponents = scales[expert].astype(np.int32) - 127
    # Infinite values are an error of `read_rows`.
    with np.errstate(over="ignore"):
      values = np.ldexp(values, exponents[:, :, None])
    result[expert] = values.reshape(rows, groups * _BLOCK).T
  return result


_GPTQ = Layout(
  main=".qweight",
  needed=((".qzeros",), (".scales",)),
  optional=(".g_idx",),
  shape=_shape_of_gptq,
  shapes=_shapes_of_gptq,
  decode=_decode_gptq,
)
_VALUES = Layout(
  main=".weight",
  dtypes=(FP8,),
  needed=((".weight_scale_inv", ".weight_scale"),),
  optional=(".weight_zero_point", ".weight_g_idx"),
  shape=_shape_of_values,
  shapes=_shapes_of_values,
  decode=_decode_values,
)
LAYOUTS: Final[Mapping[Form, Layout]] = {
  Form.GPTQ: _GPTQ,
  Form.AWQ_GEMM: dataclasses.replace(_GPTQ, decode=_decode_gemm),
  Form.AWQ_GEMV: dataclasses.replace(
    _GPTQ, shape=_shape_of_gemv, shapes=_shapes_of_gemv, decode=_decode_gemv
  ),
  Form.PACKED: Layout(
    main=".weight_packed",
    needed=((".weight_scale",), (".weight_shape",)),
    optional=(".weight_zero_point", ".weight_g_idx"),
    details=_details_of_packed,
    shape=lambda weight, shape: weight.details["shape"],
    shapes=_shapes_of_packed,
    decode=_decode_packed,
  ),
  Form.FP8: _VALUES,
  Form.INT8: dataclasses.replace(_VALUES, dtypes=(INT8,)),
  Form.BITSANDBYTES_8: dataclasses.replace(
    _VALUES,
    dtypes=(INT8,),
    needed=((".SCB",),),
    optional=(".weight_format",),
    details=_details_of_int8,
    decode=_decode_int8,
  ),
  Form.BITSANDBYTES_4: Layout(
    main=".weight.absmax",
    needed=(
      (".weight",),
      (".weight.quant_map",),
      (f"{QUANT_STATE}nf4", f"{QUANT_STATE}fp4"),
    ),
    optional=(".weight.nested_absmax", ".weight.nested_quant_map"),
    details=_details_of_blocks,
    shape=lambda weight, shape: weight.details["shape"],
    shapes=_shapes_of_blocks,
    decode=_decode_blocks,
  ),
  Form.MXFP4: Layout(
    main="_blocks",
    needed=(("_scales",),),
    shape=_shape_of_mxfp4,
    shapes=lambda weight: {},
    decode=_decode_mxfp4,
    weight="",
  ),
}
