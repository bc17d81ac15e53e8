"""Rotary positions of `config.json`.

New files have one field, `rope_parameters`; older ones have `rope_theta` and
`rope_scaling`, and some families `partial_rotary_factor`. Features `i` and
`i + dim / 2` of a head form a pair.

LongRoPE has short factors for documents up to the original length and long ones
for longer documents; `dynamic` has a base that grows with the length.
transformers chooses both by the longest document of a batch; here each document
has its own (`rotary_scaling.LengthScaling`).
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, Never

from paxon.layers.models.hugging_face import family
from paxon.layers.positions import rotary_embedding, rotary_scaling

# Keys that any type may have.
_COMMON = (
  "rope_type",
  "type",
  "rope_theta",
  "partial_rotary_factor",
  "mscale_all_dim",
)
# Types whose original length is a separate field in some files.
_STRETCHED = ("llama3", "yarn", "longrope")
_PROPORTIONAL = "proportional"
_KEYS: Mapping[str, tuple[str, ...]] = {
  "default": (),
  "linear": ("factor",),
  "dynamic": ("factor",),
  "proportional": ("factor",),
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
    "mscale",
  ),
  "longrope": (
    "short_factor",
    "long_factor",
    "factor",
    "attention_factor",
    "original_max_position_embeddings",
  ),
}


# A class and its fields.
Scaling = tuple[Callable[..., Any], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """Rotary positions of a model.

  Attributes:
    max_wavelength: Base of the angles.
    rotary_dim: Number of rotated features; `None` is all.
    interleaved: Whether features `2 i` and `2 i + 1` of a head form a pair.
    logit_factor: Factor on attention logits, which only latent attention has.
    scaling: A class of `rotary_scaling.Scaling` and its fields, which may be
      such pairs too, or `None`.
  """

  max_wavelength: float
  rotary_dim: int | None = None
  interleaved: bool = False
  logit_factor: float = 1.0
  scaling: Scaling | None = None

  def build(self, make: Callable[..., Any]) -> Any:
    """Returns a `Rotary`, built by `make(cls, **fields)`."""
    scaling = None
    if self.scaling is not None:
      cls, fields = self.scaling
      # Scalings within a scaling.
      inner = {
        name: make(value[0], **value[1])
        for name, value in fields.items()
        if isinstance(value, tuple) and callable(value[0])
      }
      scaling = make(cls, **{**fields, **inner})
    return make(
      rotary_embedding.Rotary,
      max_wavelength=self.max_wavelength,
      scaling=scaling,
      rotary_dim=self.rotary_dim,
      interleaved=self.interleaved,
    )


def read(
  fields: family.Fields,
  *,
  head_dim: int,
  max_length: int,
  partial: float | None = None,
  theta: float = 10_000.0,
  theta_field: str = "rope_theta",
  partial_field: str = "partial_rotary_factor",
  original_length: int | None = None,
  aliases: Mapping[str, str] | None = None,
  default: Mapping[str, Any] | None = None,
  interleaved: bool = False,
) -> Rope:
  """Returns the rotary positions of a `config.json`.

  Args:
    fields: Fields of the file.
    head_dim: Width of a head.
    max_length: Value of `max_position_embeddings`, the default original length.
    partial: Default fraction of rotated features; `None` if the family rotates
      all, whatever the file says.
    theta: Default of the base of the angles.
    theta_field: Field of the base in older files.
    partial_field: Field of the fraction of rotated features in older files.
    original_length: Default of the field `original_max_position_embeddings`,
      which takes precedence over the scaling's; `None` has none.
    aliases: Other names of scaling types in this family.
    default: Value of `rope_parameters` in files without either field.
    interleaved: Whether neighboring features form a pair.

  Raises:
    UnsupportedConfigError: A scaling type or a key is not supported.
  """
  parameters = _find_parameters(fields, default or {})
  theta = fields.number(theta_field, theta)
  theta = parameters.number("rope_theta", theta)
  if theta <= 1:
    named = parameters.values.get("rope_theta") is not None
    fields.reject(
      parameters.name if named else theta_field, "a base of more than 1"
    )
  kind = _find_kind(parameters, aliases or {})
  rotary_dim = _read_rotary_dim(
    parameters, kind, head_dim, field=partial_field, default=partial
  )
  length = fields.optional_size(
    "original_max_position_embeddings", original_length
  )
  if length is None or kind not in _STRETCHED:
    length = parameters.length("original_max_position_embeddings", max_length)
  sizes = _Sizes(
    head_dim=head_dim,
    rotary_dim=rotary_dim or head_dim,
    max_length=max_length,
    original_length=length,
  )
  scaling = _READERS[kind](parameters, sizes) if kind in _READERS else None
  # DeepSeek-V2 multiplies queries and keys by it, both without positions.
  weight = _read_weight(parameters, "mscale_all_dim")
  logit_factor = 1.0
  if kind != "default" and weight:
    factor = parameters.factor(sizes.growth)
    logit_factor = _find_yarn_factor(factor, weight) ** 2
  return Rope(
    max_wavelength=theta,
    # Proportional scaling has the angles of whole heads: the pairs that do not
    # turn have an infinite factor.
    rotary_dim=None if kind == _PROPORTIONAL else rotary_dim,
    interleaved=interleaved,
    logit_factor=logit_factor,
    scaling=scaling,
  )


def read_kind(
  fields: family.Fields,
  kind: str,
  *,
  bases: Mapping[str, tuple[str, float]],
  head_dim: int,
  max_length: int,
) -> Rope:
  """Returns the rotary positions of one kind of layers.

  Args:
    fields: Fields of the file.
    kind: A type of layers, as in `layer_types`. Scaling of older files is that
      of `full_attention`.
    bases: By kind, the field of the base in older files, and its default.
    head_dim: Width of a head.
    max_length: Default of `max_position_embeddings`.

  Raises:
    UnsupportedConfigError: A value is not supported.
  """
  by_kind = fields.get("rope_parameters", None) or {}
  if not isinstance(by_kind, dict) or not set(by_kind) <= set(bases):
    fields.reject("rope_parameters", f"objects for {' and '.join(bases)}")
  scaling = fields.get("rope_scaling", None)
  if scaling and by_kind:
    fields.reject("rope_scaling", "null with rope_parameters")
  if kind == "full_attention" and scaling:
    by_kind = {kind: scaling}
  theta = fields.number(*bases[kind])
  given = by_kind.get(kind) or {}
  if not isinstance(given, dict):
    fields.reject("rope_parameters", f"an object for {kind}")
  values = {"rope_theta": theta, **given}
  # The classes of transformers look for it outside of the kinds of layers.
  if values.pop("truncate", None) is not None:
    fields.ignore(f"rope_parameters.{kind}.truncate")
  inner = family.Fields(
    {"model_type": fields.model_type, "rope_parameters": values},
    architectures=(fields.architecture,),
  )
  found = read(
    inner,
    head_dim=head_dim,
    max_length=fields.size("max_position_embeddings", max_length),
  )
  for name in inner.find_ignored():
    fields.ignore(f"rope_parameters.{kind}.{name.rpartition('.')[2]}")
  return found


def _find_parameters(
  fields: family.Fields, default: Mapping[str, Any]
) -> "_Parameters":
  """Returns the object of parameters, or `default` if the file has none."""
  # The older field takes precedence in files that have both.
  old = fields.get("rope_scaling", None)
  new = fields.get("rope_parameters", None)
  name = "rope_scaling" if old else "rope_parameters"
  values = old or new or default
  if not isinstance(values, dict):
    fields.reject(name, "an object or null")
  return _Parameters(fields=fields, name=name, values=values)


def _find_kind(parameters: "_Parameters", aliases: Mapping[str, str]) -> str:
  """Returns the type of scaling, and notes keys that it does not have."""
  values = parameters.values
  kind = values.get("rope_type") or values.get("type") or "default"
  kind = aliases.get(kind, kind) if isinstance(kind, str) else kind
  if not isinstance(kind, str) or kind not in _KEYS:
    parameters.reject(f"rope_type {' or '.join(map(repr, _KEYS))}")
  # Those of other types have no effect, as in transformers.
  for key, value in values.items():
    if value is not None and key not in (*_COMMON, *_KEYS[kind]):
      parameters.fields.ignore(f"{parameters.name}.{key}")
  return kind


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
    if not 0 < value < math.inf:
      self.reject(f"a positive {key}")
    return float(value)

  def length(self, key: str, default: int) -> int:
    """Returns a positive integer, which may be written as `4096.0`."""
    value = self.number(key, float(default))
    if value != int(value) or value >= 2**31:
      self.reject(f"an integer as {key}")
    return int(value)

  def factor(self, default: float | None = None) -> float:
    """Returns `factor`, the ratio of the new to the original length."""
    value = self.number("factor", default)
    if value < 1:
      self.reject("a factor of at least 1")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
  """Sizes of a model that a scaling depends on.

  Attributes:
    head_dim: Width of a head.
    rotary_dim: Number of rotated features of a head.
    max_length: Value of `max_position_embeddings`.
    original_length: Context length without the scaling.
  """

  head_dim: int
  rotary_dim: int
  max_length: int
  original_length: int

  @property
  def growth(self) -> float:
    """Ratio of the new to the original context length."""
    return self.max_length / self.original_length


def _read_rotary_dim(
  parameters: _Parameters,
  kind: str,
  head_dim: int,
  *,
  field: str,
  default: float | None,
) -> int | None:
  """Returns the number of rotated features; `None` is all.

  Args:
    parameters: May have the fraction of rotated features.
    kind: Type of scaling.
    head_dim: Width of a head.
    field: Field of the fraction in older files.
    default: Default of the fraction; `None` if the family rotates all.
  """
  fields = parameters.fields
  fraction = fields.value(field, default)
  if parameters.values.get("partial_rotary_factor") is not None:
    field = parameters.name
    fraction = parameters.values["partial_rotary_factor"]
  is_partial = fraction not in (None, 1, 1.0)
  if default is None and is_partial and kind != _PROPORTIONAL:
    fields.reject(field, "rotation of all features (a partial factor of 1.0)")
  if fraction is None:
    return None
  is_number = isinstance(fraction, int | float)
  if isinstance(fraction, bool) or not is_number or not 0 < fraction <= 1:
    fields.reject(field, "a fraction of rotated features in (0, 1]")
  dim = int(head_dim * fraction)
  if dim < 2 or dim % 2:
    fields.reject(field, "an even number of rotated features")
  return None if dim == head_dim else dim


def _read_linear(parameters: _Parameters, sizes: _Sizes) -> Scaling:
  del sizes
  return rotary_scaling.LinearScaling, {"factor": parameters.factor()}


def _read_dynamic(parameters: _Parameters, sizes: _Sizes) -> Scaling:
  if sizes.rotary_dim == 2:
    parameters.reject("more than 2 rotated features with rope_type 'dynamic'")
  # The original length is that of the model, whatever the scaling has.
  return rotary_scaling.DynamicScaling, {
    "factor": parameters.factor(),
    "original_length": sizes.max_length,
  }


def _read_llama3(parameters: _Parameters, sizes: _Sizes) -> Scaling:
  low = parameters.number("low_freq_factor")
  high = parameters.number("high_freq_factor")
  if low >= high:
    parameters.reject("a high_freq_factor greater than low_freq_factor")
  return rotary_scaling.Llama3Scaling, {
    "factor": parameters.factor(),
    "low_frequency_factor": low,
    "high_frequency_factor": high,
    "original_length": sizes.original_length,
  }


def _read_yarn(parameters: _Parameters, sizes: _Sizes) -> Scaling:
  factor = parameters.factor(sizes.growth)
  wave_factor = _read_yarn_factor(parameters, factor)
  fast = parameters.number("beta_fast", 32.0)
  slow = parameters.number("beta_slow", 1.0)
  if slow > fast:
    parameters.reject("a beta_fast of at least beta_slow")
  return rotary_scaling.YarnScaling, {
    "factor": factor,
    "original_length": sizes.original_length,
    "fast_turns": fast,
    "slow_turns": slow,
    "truncate": parameters.values.get("truncate", True),
    "wave_factor": wave_factor,
  }


def _read_proportional(
  parameters: _Parameters, sizes: _Sizes
) -> Scaling | None:
  """Returns the scaling of all pairs, of which only the rotated turn."""
  rotated, pairs = sizes.rotary_dim // 2, sizes.head_dim // 2
  factor = parameters.factor(1.0)
  if rotated == pairs and factor == 1:
    return None
  factors = (factor,) * rotated + (math.inf,) * (pairs - rotated)
  return rotary_scaling.PairScaling, {"factors": factors}


def _read_longrope(parameters: _Parameters, sizes: _Sizes) -> Scaling:
  pairs, length = sizes.rotary_dim // 2, sizes.original_length
  factors: dict[str, tuple[float, ...]] = {}
  for key in ("short_factor", "long_factor"):
    values = parameters.values.get(key)
    if not isinstance(values, list) or len(values) != pairs:
      parameters.reject(f"a {key} of {pairs} numbers")
    for value in values:
      is_number = isinstance(value, int | float)
      if isinstance(value, bool) or not is_number or not 0 < value < math.inf:
        parameters.reject(f"a {key} of positive numbers")
    factors[key] = tuple(map(float, values))
  if length == 1:
    parameters.reject("an original length of more than 1")
  factor = parameters.number("factor", sizes.growth)
  default = find_wave_factor(factor=factor, original_length=length)
  wave_factor = parameters.number("attention_factor", default)

  def scaling(key: str) -> Scaling:
    fields = {"factors": factors[key], "wave_factor": wave_factor}
    return rotary_scaling.PairScaling, fields

  return rotary_scaling.LongScaling, {
    "short": scaling("short_factor"),
    "long": scaling("long_factor"),
    "original_length": length,
  }


def _read_yarn_factor(parameters: _Parameters, factor: float) -> float:
  """Returns the factor on queries and on keys."""
  if not isinstance(parameters.values.get("truncate", True), bool):
    parameters.reject("a truncate of true or false")
  default = _find_yarn_factor(factor, 1.0)
  weights = [
    _read_weight(parameters, key) for key in ("mscale", "mscale_all_dim")
  ]
  if all(weights):
    both = [_find_yarn_factor(factor, weight) for weight in weights]
    default = both[0] / both[1]
  return parameters.number("attention_factor", default)


def _read_weight(parameters: _Parameters, key: str) -> float:
  """Returns a number that may be 0, which is also the default."""
  value = parameters.values.get(key)
  is_zero = value == 0 and not isinstance(value, bool)
  return 0.0 if value is None or is_zero else parameters.number(key)


def _find_yarn_factor(factor: float, weight: float) -> float:
  return 0.1 * weight * math.log(factor) + 1.0


_READERS: Mapping[str, Callable[[_Parameters, _Sizes], Scaling | None]] = {
  "linear": _read_linear,
  "dynamic": _read_dynamic,
  _PROPORTIONAL: _read_proportional,
  "llama3": _read_llama3,
  "yarn": _read_yarn,
  "longrope": _read_longrope,
}
