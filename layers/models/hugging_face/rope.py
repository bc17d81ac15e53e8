"""Rotary positions of `config.json`.

New files have one field, `rope_parameters`; older ones have `rope_theta` and
`rope_scaling`, and some families `partial_rotary_factor`. Features `i` and
`i + dim / 2` of a head form a pair.

LongRoPE has short factors for contexts up to the original length and long ones
for longer contexts. transformers chooses by the largest position in a batch, so
results depend on other sequences, and cached keys become invalid at the switch.
Here only the short factors are supported; positions beyond give NaN.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, Never

from paxon.layers import rotary_embedding, rotary_scaling
from paxon.layers.models.hugging_face import family

# Keys that any type may have.
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_KEYS: Mapping[str, tuple[str, ...]] = {
  "default": (),
  "linear": ("factor",),
  "llama3": (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ),
  "yarn": (
    "factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
    "original_max_position_embeddings",
  ),
  "longrope": (
    "short_factor",
    "long_factor",
    "factor",
    "attention_factor",
    "original_max_position_embeddings",
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """Rotary positions of a model.

  Attributes:
    max_wavelength: Base of the angles.
    rotary_dim: Number of rotated features; `None` is all.
    scaling: A class of `rotary_scaling.Scaling` and its fields, or `None`.
    max_length: Positions from here on give NaN; `None` has no limit.
  """

  max_wavelength: float
  rotary_dim: int | None = None
  scaling: tuple[Callable[..., Any], Mapping[str, Any]] | None = None
  max_length: int | None = None

  def build(self, make: Callable[..., Any]) -> Any:
    """Returns a `Rotary`, built by `make(cls, **fields)`."""
    scaling = None
    if self.scaling is not None:
      scaling = make(self.scaling[0], **self.scaling[1])
    return make(
      rotary_embedding.Rotary,
      max_wavelength=self.max_wavelength,
      scaling=scaling,
      rotary_dim=self.rotary_dim,
      max_length=self.max_length,
    )


def read(
  fields: family.Fields,
  *,
  head_dim: int,
  max_length: int,
  partial: float | None = None,
  theta_field: str = "rope_theta",
  partial_field: str = "partial_rotary_factor",
  original_length: int | None = None,
  aliases: Mapping[str, str] | None = None,
) -> Rope:
  """Returns the rotary positions of a `config.json`.

  Args:
    fields: Fields of the file.
    head_dim: Width of a head.
    max_length: Value of `max_position_embeddings`, the default original length.
    partial: Default fraction of rotated features; `None` if the family rotates
      all, whatever the file says.
    theta_field: Field of the base in older files.
    partial_field: Field of the fraction of rotated features in older files.
    original_length: Sequence length of pretraining, if the family has a field
      for it; takes precedence over the scaling's.
    aliases: Other names of scaling types in this family.

  Raises:
    UnsupportedConfigError: A scaling type or a key is not supported.
  """
  # The older field takes precedence in files that have both.
  old = fields.get("rope_scaling", None)
  new = fields.get("rope_parameters", None)
  name, values = "rope_scaling" if old else "rope_parameters", old or new or {}
  if not isinstance(values, dict):
    fields.reject(name, "an object or null")
  parameters = _Parameters(fields=fields, name=name, values=values)
  theta = fields.number(theta_field, 10_000.0)
  theta = parameters.number("rope_theta", theta)
  fraction = fields.get(partial_field, partial)
  fraction = values.get("partial_rotary_factor", fraction)
  if partial is None and fraction not in (None, 1, 1.0):
    in_values = "partial_rotary_factor" in values
    fields.reject(
      parameters.name if in_values else partial_field,
      "rotation of all features (a partial factor of 1.0)",
    )
  rotary_dim = _find_rotary_dim(parameters, fraction, head_dim)
  kind = values.get("rope_type", values.get("type", "default"))
  kind = (aliases or {}).get(kind, kind)
  if kind not in _KEYS:
    parameters.reject(f"rope_type {' or '.join(map(repr, _KEYS))}")
  # Files keep keys of other types as null.
  unknown = [key for key, value in values.items() if value is not None]
  if set(unknown) - {*_COMMON, *_KEYS[kind]}:
    parameters.reject(f"the keys {_KEYS[kind]} of rope_type {kind!r}")
  length = original_length or int(
    parameters.number("original_max_position_embeddings", float(max_length))
  )
  if kind == "longrope":
    pairs = (rotary_dim or head_dim) // 2
    scaling = _read_longrope(parameters, pairs, max_length, length)
  else:
    scaling = _read_scaling(parameters, kind, length)
  return Rope(
    max_wavelength=theta,
    rotary_dim=rotary_dim,
    scaling=scaling,
    max_length=length if kind == "longrope" else None,
  )


def find_wave_factor(*, factor: float, original_length: int) -> float:
  """Returns LongRoPE's default factor on queries and keys.

  `factor` is the ratio of the new to the original context length.
  """
  if factor <= 1:
    return 1.0
  return math.sqrt(1 + math.log(factor) / math.log(original_length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parameters:
  """The object of parameters in the field `name`."""

  fields: family.Fields
  name: str
  values: Mapping[str, Any]

  def reject(self, supported: str) -> Never:
    self.fields.reject(self.name, supported)

  def number(self, key: str, default: float | None = None) -> float:
    """Returns a positive number."""
    value = self.values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
      self.reject(f"a number as {key}")
    if value <= 0:
      self.reject(f"a positive {key}")
    return float(value)


def _find_rotary_dim(
  parameters: _Parameters, fraction: Any, head_dim: int
) -> int | None:
  if fraction is None:
    return None
  if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
    parameters.reject("a fraction of rotated features in (0, 1]")
  dim = int(head_dim * fraction)
  if dim < 2 or dim % 2:
    parameters.reject("an even number of rotated features")
  return None if dim == head_dim else dim


def _read_scaling(
  parameters: _Parameters, kind: str, length: int
) -> tuple[Callable[..., Any], Mapping[str, Any]] | None:
  number = parameters.number
  if kind == "linear":
    return rotary_scaling.LinearScaling, {"factor": number("factor")}
  if kind == "llama3":
    return rotary_scaling.Llama3Scaling, {
      "factor": number("factor"),
      "low_frequency_factor": number("low_freq_factor"),
      "high_frequency_factor": number("high_freq_factor"),
      "original_length": length,
    }
  if kind == "yarn":
    _check_yarn(parameters)
    return rotary_scaling.YarnScaling, {
      "factor": number("factor"),
      "original_length": length,
      "fast_turns": number("beta_fast", 32.0),
      "slow_turns": number("beta_slow", 1.0),
    }
  return None


def _read_longrope(
  parameters: _Parameters, pairs: int, max_length: int, length: int
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
  for key in ("short_factor", "long_factor"):
    factors = parameters.values.get(key)
    if not isinstance(factors, list) or len(factors) != pairs:
      parameters.reject(f"a {key} of {pairs} numbers")
  factor = parameters.number("factor", max_length / length)
  default = find_wave_factor(factor=factor, original_length=length)
  factors = tuple(float(each) for each in parameters.values["short_factor"])
  return rotary_scaling.PairScaling, {
    "factors": factors,
    "wave_factor": parameters.number("attention_factor", default),
  }


def _check_yarn(parameters: _Parameters) -> None:
  """Rejects values that `YarnScaling` would compute otherwise."""
  factor = parameters.number("factor")
  amplitude = parameters.values.get("attention_factor")
  default = 0.1 * math.log(factor) + 1.0
  if amplitude is not None and not math.isclose(
    amplitude, default, rel_tol=1e-6
  ):
    parameters.reject(f"an attention_factor of {default:.6f} for its factor")
  if parameters.values.get("truncate", True) is not True:
    parameters.reject("truncate true")
