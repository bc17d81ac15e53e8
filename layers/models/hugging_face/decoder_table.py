"""Families of decoders as tables.

A table has the fields of `decoder.Decoder` and of its parts: values, or fields
of `config.json` with their defaults in transformers.

```python
OLMO2 = make(
  "olmo2",
  "Olmo2ForCausalLM",
  max_length=2048,
  epsilon=1e-5,
  form=block_layers.POST_NORM,
  attention={"head_norm": "width", "qkv_bias": flag("attention_bias", False)},
)
```

Fields that most families share need no entry; see `read`.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from types import MappingProxyType
from typing import Any

from paxon.layers.models.hugging_face import (
  attention_layers,
  block_layers,
  decoder,
  family,
)
from paxon.layers.models.hugging_face import rope as rotary
from paxon.layers.models.hugging_face.files import quantized_config

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Field:
  """A value that depends on the file.

  Attributes:
    read: Returns it from the fields of the file.
  """

  read: Callable[[family.Fields], Any]


def _reader(method: Callable[..., Any]) -> Callable[..., Field]:
  """Returns a function that makes a `Field` of a method of `family.Fields`."""

  @functools.wraps(method)
  def make_field(*args: Any, **keywords: Any) -> Field:
    return Field(lambda fields: method(fields, *args, **keywords))

  return make_field


# As the methods of `family.Fields`, of a file that is read later.
activation = _reader(family.Fields.activation)
count = _reader(family.Fields.count)
flag = _reader(family.Fields.flag)
map_value = _reader(family.Fields.map_value)
number = _reader(family.Fields.number)
optional_number = _reader(family.Fields.optional_number)
optional_size = _reader(family.Fields.optional_size)
size = _reader(family.Fields.size)

# The most usual fields.
ATTENTION_BIAS = flag("attention_bias", False)
BIASES: Mapping[str, Any] = {
  "qkv_bias": ATTENTION_BIAS,
  "output_bias": ATTENTION_BIAS,
}
MLP_BIAS: Mapping[str, Any] = {"use_bias": flag("mlp_bias", False)}


def layer_norm(epsilon: Field | float, *, has_bias: bool = True) -> Any:
  """Returns the fields of `block_layers.Norm` for layer norms."""
  return {"epsilon": epsilon, "subtracts_mean": True, "has_bias": has_bias}


def sliding(
  default: int | None,
  name: str = "sliding_window",
  *,
  is_sliding: Callable[[int, family.Fields], bool] | None = None,
) -> Field:
  """Returns the windows of layers of which some slide.

  Args:
    default: Default of the window; `None` is full attention.
    name: Field of the window.
    is_sliding: Whether a layer, by its number, has the window in files without
      `layer_types`. `None` is a family that has no such field, in which all
      layers have the window.
  """

  def read_windows(fields: family.Fields) -> tuple[int | None, ...]:
    window = fields.optional_size(name, default)
    num_layers = fields.size("num_hidden_layers")
    if is_sliding is None:
      return (window,) * num_layers
    # Its fields are read in any case.
    by_rule = [is_sliding(i, fields) for i in range(num_layers)]
    if fields.get("layer_types", None) is not None:
      return read_layer_types(fields, window)
    return tuple(window if slides else None for slides in by_rule)

  return Field(read_windows)


# Full attention in all layers.
FULL = Field(lambda fields: (None,) * fields.size("num_hidden_layers"))


def read_layer_types(
  fields: family.Fields, window: int | None
) -> tuple[int | None, ...]:
  """Returns the window of each layer by `layer_types`.

  Raises:
    UnsupportedConfigError: It does not have a valid entry for each layer, or
      needs a window that is not set.
  """
  sliding_layers = read_kinds(fields, "layer_types", _SLIDING, _FULL)
  if sliding_layers and window is None:
    fields.reject("layer_types", f"{_FULL!r} without sliding_window")
  return tuple(
    window if i in sliding_layers else None
    for i in range(fields.size("num_hidden_layers"))
  )


def read_kinds(
  fields: family.Fields, name: str, kind: str, other: str
) -> tuple[int, ...]:
  """Returns the layers of one of two kinds, by a field that lists them.

  Raises:
    UnsupportedConfigError: It does not have a valid entry for each layer.
  """
  num_layers = fields.size("num_hidden_layers")
  kinds = fields.get(name)
  if not isinstance(kinds, list) or len(kinds) != num_layers:
    fields.reject(name, f"a list of {num_layers} types")
  if any(each not in (kind, other) for each in kinds):
    fields.reject(name, f"{other!r} or {kind!r}")
  return tuple(i for i, each in enumerate(kinds) if each == kind)


def resolve(value: Any, fields: family.Fields) -> Any:
  """Returns a value of a table for the fields of a file."""
  if isinstance(value, Field):
    return value.read(fields)
  if isinstance(value, Mapping):
    return {name: resolve(each, fields) for name, each in value.items()}
  return value


def read(
  fields: family.Fields,
  *,
  max_length: int | None,
  epsilon: float = 1e-6,
  kv_heads: int | None = None,
  has_kv_heads: bool = True,
  head_dim: int | None = None,
  null_shares: bool = False,
  windows: Field | tuple[int | None, ...] = FULL,
  norm: Mapping[str, Any] | None = None,
  rope: Mapping[str, Any] | Field | None = MappingProxyType({}),
  position_offset: int | None = None,
  attention: Mapping[str, Any] | Field | None = None,
  mlp: Mapping[str, Any] | None = None,
  **features: Any,
) -> decoder.Decoder:
  """Reads a `config.json` by a table.

  Args:
    fields: Fields of the file.
    max_length: Default of `max_position_embeddings`; `None` does not read it.
    epsilon: Default of `rms_norm_eps`, unless `norm` has another field.
    kv_heads: Default of `num_key_value_heads`.
    has_kv_heads: Whether the family has that field.
    head_dim: Default of `head_dim`.
    null_shares: Whether null as `head_dim` is a share of `hidden_size`,
      although the default is not.
    windows: The windows of the layers.
    norm: Fields of `block_layers.Norm`.
    rope: Further arguments of `rope.read`, or a whole `rope.Rope`; `None` is no
      rotary positions.
    position_offset: The first row of a table of learned positions; `None` is no
      table.
    attention: Fields of `attention_layers.Attention`, besides sizes of heads,
      or another attention, which needs `rope`.
    mlp: Fields of `block_layers.FeedForward`, where they are not
      `intermediate_size` and `hidden_act`.
    **features: Fields of `decoder.Vocabulary`, and further ones of
      `decoder.Decoder`.
  """
  if null_shares and fields.get("head_dim", head_dim) is None:
    head_dim = None
  mixer = resolve(attention or {}, fields)
  if isinstance(mixer, dict):
    heads = attention_layers.read_heads(
      fields, kv_heads=kv_heads, head_dim=head_dim, has_kv_heads=has_kv_heads
    )
    mixer = attention_layers.Attention(**{**heads, **mixer})
    head_dim = mixer.head_dim
  norm = norm or {"epsilon": number("rms_norm_eps", epsilon)}
  of_mlp = {
    "mlp_dim": size("intermediate_size"),
    "activation": activation("hidden_act", "silu"),
    **(mlp or {}),
  }
  length = max_length and fields.size("max_position_embeddings", max_length)
  positions = resolve(rope, fields)
  if isinstance(positions, dict):
    positions = rotary.read(
      fields, head_dim=head_dim or 0, max_length=length or 0, **positions
    )
  values = {
    "tied": flag("tie_word_embeddings", False),
    "size": size("vocab_size"),
    **features,
  }
  if position_offset is not None:
    values |= {"positions": length, "position_offset": position_offset}
  values = resolve(values, fields)
  ends = {each.name for each in dataclasses.fields(decoder.Vocabulary)}
  return decoder.Decoder(
    vocabulary=decoder.Vocabulary(
      **{name: values.pop(name) for name in ends & values.keys()}
    ),
    embed_dim=fields.size("hidden_size"),
    attention=mixer,
    windows=resolve(windows, fields),
    rope=positions,
    norm=block_layers.Norm(**resolve(norm, fields)),
    feed_forward=block_layers.FeedForward(**resolve(of_mlp, fields)),
    **values,
  )


def make(
  model_type: str,
  architecture: str,
  *,
  aliases: Mapping[str, str] | None = None,
  neutral: Mapping[str, tuple[Any, ...]] | None = None,
  inert: tuple[str, ...] = (),
  other_architectures: tuple[str, ...] = (),
  packings: tuple[str, ...] = quantized_config.OF_LAYERS,
  further_layers: str = "",
  **table: Any,
) -> family.Family:
  """Returns the family of a table.

  The arguments are those of `family.Family` and of `read`.
  """
  return family.Family(
    model_type=model_type,
    architecture=architecture,
    read=functools.partial(read, **table),
    aliases=aliases or {},
    neutral=neutral or {},
    inert=inert,
    other_architectures=other_architectures,
    packings=packings,
    further_layers=further_layers,
  )
