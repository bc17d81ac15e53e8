"""8-bit and 4-bit storage of keys and values, with one scale per vector.

A vector (row) is the features of one token and one head. Its scale depends on
its own largest magnitude only: vectors can be written one by one, into any
slot, and nothing is ever quantized twice.

  scale = bfloat16(max|x| / largest)      kept = round(x / scale)

The scale is rounded first and the row is divided by what it was rounded to, so
its rounding costs nothing: with int8 each feature is off by half a scale at
most, 1/253 of the largest one of its row. A bfloat16 scale has the range of
float32 and adds 2 bytes a row, an eighth of a bit a feature where there are
128.
"""

from collections.abc import Mapping
import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.quantization import number_formats

_SCALE: Final = "scale"
_SCALE_DTYPE: Final = jnp.bfloat16
_FORMATS: Final = {
  "int8": number_formats.INT8,
  "fp8": number_formats.FP8_E4M3,
  "int4": number_formats.INT4,
}
NAMES: Final = tuple(_FORMATS)


@dataclasses.dataclass(frozen=True)
class QuantizedRows:
  """Stores each vector in 8 or 4 bits, with a bfloat16 scale.

  A vector with a NaN or an infinity is NaN when it is read.

  Attributes:
    format: `int8`; `fp8`, which is float8_e4m3fn: as many bytes, finer near
      zero and coarser elsewhere; or `int4`, two features a byte.
  """

  format: str = "int8"

  def __post_init__(self) -> None:
    if self.format not in NAMES:
      raise ValueError(
        f"QuantizedRows.format must be {', '.join(NAMES[:-1])} or {NAMES[-1]},"
        f" got {self.format!r}."
      )

  def encode(self, x: jax.Array) -> Mapping[str, jax.Array]:
    """Returns the stored features and scales of vectors [B,T,K,H].

    Features are int8 or float8_e4m3fn [B,T,K,H], or int8 [B,T,K,H/2] for int4;
    scales are bfloat16 [B,T,K].

    Raises:
      ValueError: H is odd, and the format packs two features.
    """
    numbers = _FORMATS[self.format]
    wide = x.astype(jnp.float32)
    # A NaN passes the maximum; an infinity is made one.
    top = jnp.max(jnp.abs(wide), axis=-1)
    top = jnp.where(jnp.isfinite(top), top, jnp.nan)
    scale = (top / numbers.largest).astype(_SCALE_DTYPE)
    by = scale.astype(jnp.float32)[..., None]
    # Vectors of zeros, and of values too small for a scale, become zeros.
    scaled = jnp.where(by > 0, wide / jnp.where(by > 0, by, 1.0), 0.0)
    # Scaled values may exceed the range of the format by less than half a step,
    # because the scale was rounded.
    kept = number_formats.saturating_cast(scaled, numbers)
    return {
      "": number_formats.pack(kept) if numbers.bits == 4 else kept,
      _SCALE: scale,
    }

  def decode(
    self, parts: Mapping[str, jax.Array], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the stored vectors [B,S,K,H] in `dtype`."""
    kept = parts[""]
    if _FORMATS[self.format].bits == 4:
      kept = number_formats.unpack(kept)
    scale = parts[_SCALE].astype(jnp.float32)[..., None]
    return (kept.astype(jnp.float32) * scale).astype(dtype)
