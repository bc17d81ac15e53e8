"""Rotary positions as `config.json` describes them.

New files have one field, `rope_parameters`; older ones `rope_theta` and
`rope_scaling`, with `partial_rotary_factor` beside them in some families.
Features `i` and `i + dim / 2` of a head form a pair in all of these families.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

from paxon.layers import rotary_embedding, rotary_scaling
from paxon.layers.models.hugging_face import config_fields, long_rope

# Keys that any kind may have.
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
    max_wavelength: The base of the angles.
    rotary_dim: How many features are rotated; `None` for all.
    scaling: A class of `rotary_scaling.Scaling` and its fields, or `None`.
    length: Positions from here on give NaN; `None` serves all.
  """

  max_wavelength: float
  rotary_dim: int | None = None
  scaling: tuple[Callable[..., Any], Mapping[str, Any]] | None = None
  length: int | None = None

  def build(self, make: Callable[..., Any]) -> Any:
    """Returns the part, or what `make` makes of it.

    Args:
      make: Called with a class and its fields.
    """
    scaling = None
    if self.scaling is not None:
      scaling = make(self.scaling[0], **self.scaling[1])
    rotary = make(
      rotary_embedding.Rotary,
      max_wavelength=self.max_wavelength,
      scaling=scaling,
      rotary_dim=self.rotary_dim,
    )
    if self.length is None:
      return rotary
    return make(long_rope.BoundedRotary, rotary=rotary, length=self.length)


def read(
  fields: config_fields.Fields,
  *,
  head_dim: int,
  max_length: int,
  partial: float | None = None,
  theta_field: str = "rope_theta",
  partial_field: str = "partial_rotary_factor",
  original_length: int | None = None,
  aliases: Mapping[str, str] | None = None,
) -> Rope:
  """Returns what a file says of rotary positions.

  Args:
    fields: Of the file.
    head_dim: Width of a head.
    max_length: Its `max_position_embeddings`, where scalings begin by default.
    partial: The share of rotated features by default; `None` if the family
      rotates all, whatever the file says.
    theta_field: The base of the angles in older files.
    partial_field: The share of rotated features in older files.
    original_length: That of the rows of the first training, where a family has
      a field for it; it goes before what the scaling says.
    aliases: Other names of kinds of scaling in this family.

  Raises:
    UnservedConfigError: A kind of scaling, or a key, is not served.
  """
  # The older field goes before the newer one where a file has both.
  old = fields.any("rope_scaling", None)
  name = "rope_scaling" if old else "rope_parameters"
  new = fields.any("rope_parameters", None)
  found = old or new or {}
  theta = fields.number(theta_field, 10_000.0)
  share = fields.any(partial_field, partial)
  if not isinstance(found, dict):
    fields.refuse(name, "an object or null")
  theta = _number(fields, name, found, "rope_theta", theta)
  share = found.get("partial_rotary_factor", share)
  if partial is None and share not in (None, 1, 1.0):
    fields.refuse(
      name if "partial_rotary_factor" in found else partial_field,
      "rotation of all features (a partial factor of 1.0)",
    )
  rotary_dim = _rotary_dim(fields, name, share, head_dim)
  kind = found.get("rope_type", found.get("type", "default"))
  kind = (aliases or {}).get(kind, kind)
  if kind not in _KEYS:
    fields.refuse(name, f"rope_type {' or '.join(map(repr, _KEYS))}")
  # Files keep keys of other kinds as null.
  unknown = [key for key, value in found.items() if value is not None]
  if set(unknown) - {*_COMMON, *_KEYS[kind]}:
    fields.refuse(name, f"the keys {_KEYS[kind]} of rope_type {kind!r}")
  length = original_length or int(
    _number(
      fields,
      name,
      found,
      "original_max_position_embeddings",
      float(max_length),
    )
  )
  scaling, bound = _scaling(fields, name, found, kind, length), None
  if kind == "longrope":
    pairs = (rotary_dim or head_dim) // 2
    scaling = _longrope(fields, name, found, pairs, max_length, length)
    bound = length
  return Rope(
    max_wavelength=theta, rotary_dim=rotary_dim, scaling=scaling, length=bound
  )


def _rotary_dim(
  fields: config_fields.Fields, name: str, share: Any, head_dim: int
) -> int | None:
  if share is None:
    return None
  if not isinstance(share, int | float) or not 0 < share <= 1:
    fields.refuse(name, "a share of rotated features above 0 and at most 1")
  dim = int(head_dim * share)
  if dim < 2 or dim % 2:
    fields.refuse(name, "an even number of rotated features")
  return None if dim == head_dim else dim


def _scaling(
  fields: config_fields.Fields,
  name: str,
  found: Mapping[str, Any],
  kind: str,
  length: int,
) -> tuple[Callable[..., Any], Mapping[str, Any]] | None:
  def number(key: str, default: float | None = None) -> float:
    return _number(fields, name, found, key, default)

  if kind == "linear":
    return rotary_scaling.LinearScaling, {"factor": number("factor")}
  if kind == "llama3":
    return rotary_embedding.Llama3Scaling, {
      "factor": number("factor"),
      "low_frequency_factor": number("low_freq_factor"),
      "high_frequency_factor": number("high_freq_factor"),
      "original_length": length,
    }
  if kind == "yarn":
    _check_yarn(fields, name, found)
    return rotary_scaling.YarnScaling, {
      "factor": number("factor"),
      "original_length": length,
      "fast_turns": number("beta_fast", 32.0),
      "slow_turns": number("beta_slow", 1.0),
    }
  return None


def _longrope(
  fields: config_fields.Fields,
  name: str,
  found: Mapping[str, Any],
  pairs: int,
  max_length: int,
  length: int,
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
  for key in ("short_factor", "long_factor"):
    factors = found.get(key)
    if not isinstance(factors, list) or len(factors) != pairs:
      fields.refuse(name, f"a {key} of {pairs} numbers")
  factor = _number(fields, name, found, "factor", max_length / length)
  usual = long_rope.wave_factor(factor=factor, original_length=length)
  return long_rope.PairScaling, {
    "factors": tuple(float(each) for each in found["short_factor"]),
    "wave_factor": _number(fields, name, found, "attention_factor", usual),
  }


def _check_yarn(
  fields: config_fields.Fields, name: str, found: Mapping[str, Any]
) -> None:
  """Refuses what `YarnScaling` computes by itself, if it differs."""
  factor = _number(fields, name, found, "factor", None)
  amplitude = found.get("attention_factor")
  usual = 0.1 * math.log(factor) + 1.0
  if amplitude is not None and not math.isclose(amplitude, usual, rel_tol=1e-6):
    fields.refuse(name, f"an attention_factor of {usual:.6f} for its factor")
  if found.get("truncate", True) is not True:
    fields.refuse(name, "truncate true")


def _number(
  fields: config_fields.Fields,
  name: str,
  found: Mapping[str, Any],
  key: str,
  default: float | None,
) -> float:
  value = found.get(key)
  value = default if value is None else value
  if isinstance(value, bool) or not isinstance(value, int | float):
    fields.refuse(name, f"a number as {key}")
  if value <= 0:
    fields.refuse(name, f"a positive {key}")
  return float(value)
