"""Gemma 1, 2 and 3 (text).

- Gemma (Gemma Team 2024, https://arxiv.org/abs/2403.08295)
- Gemma 2 (Gemma Team 2024, https://arxiv.org/abs/2408.00118)
- Gemma 3 (Gemma Team 2025, https://arxiv.org/abs/2503.19786)

Norms store their scale minus one. Embedded tokens are multiplied by the square
root of their width, rounded to the dtype of the model.
"""

from typing import Any

from paxon.layers import activations
from paxon.layers.models.hugging_face import (
  attention_layers,
  family,
  gated_decoder,
  rope,
)

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Period of local and global layers in Gemma 3, unless the file sets it.
_GEMMA3_PERIOD = 6
# By type of layer: the field of the base in older files, and its default.
_GEMMA3_BASES = {
  _GLOBAL: ("rope_theta", 1_000_000.0),
  _LOCAL: ("rope_local_base_freq", 10_000.0),
}


def _read_common(
  fields: family.Fields, *, kv_heads: int, **attention: Any
) -> dict[str, Any]:
  """Returns fields of `GatedDecoder` that all Gemmas share.

  `kv_heads` is a default; `attention` are further fields of `Attention`.
  """
  heads = attention_layers.read_heads(fields, kv_heads=kv_heads, head_dim=256)
  embed_dim = fields.size("hidden_size")
  bias = fields.flag("attention_bias", False)
  # Bidirectional masks are for sentence embeddings, without a head.
  fields.map_value(
    "use_bidirectional_attention", False, {False: False, None: False}
  )
  return {
    "vocab_size": fields.size("vocab_size"),
    "embed_dim": embed_dim,
    "attention": attention_layers.Attention(
      **heads, qkv_bias=bias, output_bias=bias, **attention
    ),
    "mlp_dim": fields.size("intermediate_size"),
    "epsilon": fields.number("rms_norm_eps", 1e-6),
    "tied": fields.flag("tie_word_embeddings", True),
    "norm_offset": 1.0,
    "input_scale": embed_dim**0.5,
  }


def _read_gemma(fields: family.Fields) -> gated_decoder.GatedDecoder:
  common = _read_common(fields, kv_heads=16)
  # Old files have "gelu" for its tanh approximation; newer ones repeat it in a
  # second field, which some versions of transformers read.
  supported = {**family.ACTIVATIONS, "gelu": activations.gelu_tanh}
  activation = fields.map_value("hidden_act", "gelu_pytorch_tanh", supported)
  repeated = {**supported, None: activation}
  if fields.map_value("hidden_activation", None, repeated) is not activation:
    fields.reject("hidden_activation", "null or the value of hidden_act")
  return gated_decoder.GatedDecoder(
    **common,
    windows=(None,) * fields.size("num_hidden_layers"),
    rope=_read_rope(fields, common["attention"].head_dim),
    activation=activation,
  )


def _read_gemma2(fields: family.Fields) -> gated_decoder.GatedDecoder:
  common = _read_common_2_3(
    fields,
    period=2,
    logit_cap=fields.optional_number("attn_logit_softcapping", 50.0),
  )
  return gated_decoder.GatedDecoder(
    **common,
    rope=_read_rope(fields, common["attention"].head_dim),
    logit_cap=fields.optional_number("final_logit_softcapping", 30.0),
  )


def _read_gemma3(fields: family.Fields) -> gated_decoder.GatedDecoder:
  # Written by transformers beside `layer_types`, and not read.
  fields.get("_sliding_window_pattern", None)
  common = _read_common_2_3(fields, period=None, has_head_norm=True)
  # The class of transformers reads this field and does not use it.
  fields.map_value("attn_logit_softcapping", None, {None: None})
  ropes = {
    kind: _read_gemma3_rope(fields, kind, head_dim=common["attention"].head_dim)
    for kind in _GEMMA3_BASES
  }
  return gated_decoder.GatedDecoder(
    **common,
    rope=ropes[_GLOBAL],
    local_rope=ropes[_LOCAL],
    logit_cap=fields.optional_number("final_logit_softcapping", None),
  )


def _read_common_2_3(
  fields: family.Fields, *, period: int | None, **attention: Any
) -> dict[str, Any]:
  """Returns fields of `GatedDecoder` that Gemma 2 and 3 share.

  Every `period`-th layer is global unless the file lists the types of layers;
  `None` reads the period from the file. `attention` are further fields of
  `Attention`.
  """
  activation = fields.activation("hidden_activation", "gelu_pytorch_tanh")
  # Some files repeat it in the field of other families.
  repeated = {**family.ACTIVATIONS, None: activation}
  if fields.map_value("hidden_act", None, repeated) is not activation:
    fields.reject("hidden_act", "null or the value of hidden_activation")
  return {
    **_read_common(
      fields,
      kv_heads=4,
      logit_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
      **attention,
    ),
    "windows": _read_windows(fields, period),
    "activation": activation,
    "has_post_norms": True,
  }


def _read_windows(
  fields: family.Fields, period: int | None
) -> tuple[int | None, ...]:
  """Returns the sliding window of each layer."""
  num_layers = fields.size("num_hidden_layers")
  name = "sliding_window_pattern"
  period = fields.size(name, _GEMMA3_PERIOD) if period is None else period
  by_period = [
    _LOCAL if (i + 1) % period else _GLOBAL for i in range(num_layers)
  ]
  kinds = fields.get("layer_types", None)
  kinds = by_period if kinds is None else kinds
  is_list = isinstance(kinds, list) and len(kinds) == num_layers
  if not is_list or any(kind not in (_LOCAL, _GLOBAL) for kind in kinds):
    fields.reject(
      "layer_types", f"{num_layers} times {_LOCAL!r} or {_GLOBAL!r}"
    )
  if fields.has(name) and kinds != by_period:
    fields.reject(name, "a period that agrees with layer_types")
  window = fields.optional_size("sliding_window", 4096)
  if window is None and _LOCAL in kinds:
    fields.reject("sliding_window", f"a positive integer with {_LOCAL!r}")
  if fields.value("sliding_window_size", window) != window:
    fields.reject("sliding_window_size", f"sliding_window ({window})")
  return tuple(window if kind == _LOCAL else None for kind in kinds)


def _read_rope(fields: family.Fields, head_dim: int) -> rope.Rope:
  return rope.read(
    fields,
    head_dim=head_dim,
    max_length=fields.size("max_position_embeddings", 8192),
  )


def _read_gemma3_rope(
  fields: family.Fields, kind: str, *, head_dim: int
) -> rope.Rope:
  """Returns the rotary positions of local or global layers."""
  by_kind = fields.get("rope_parameters", None) or {}
  if not isinstance(by_kind, dict) or not set(by_kind) <= set(_GEMMA3_BASES):
    fields.reject(
      "rope_parameters", f"objects for {' and '.join(_GEMMA3_BASES)}"
    )
  scaling = fields.get("rope_scaling", None)
  if scaling and by_kind:
    fields.reject("rope_scaling", "null with rope_parameters")
  if kind == _GLOBAL and scaling:
    by_kind = {kind: scaling}
  theta = fields.number(*_GEMMA3_BASES[kind])
  given = by_kind.get(kind) or {}
  if not isinstance(given, dict):
    fields.reject("rope_parameters", f"an object for {kind}")
  values = {"rope_theta": theta, **given}
  # The class of transformers looks for it beside the kinds of layers.
  if values.pop("truncate", None) is not None:
    fields.ignore(f"rope_parameters.{kind}.truncate")
  inner = family.Fields(
    {"model_type": GEMMA3.model_type, "rope_parameters": values},
    architectures=(GEMMA3.architecture,),
  )
  found = rope.read(
    inner,
    head_dim=head_dim,
    max_length=fields.size("max_position_embeddings", 131_072),
  )
  for name in inner.find_ignored():
    fields.ignore(f"rope_parameters.{kind}.{name.rpartition('.')[2]}")
  return found


GEMMA = family.Family(
  model_type="gemma", architecture="GemmaForCausalLM", read=_read_gemma
)
GEMMA2 = family.Family(
  model_type="gemma2",
  architecture="Gemma2ForCausalLM",
  read=_read_gemma2,
  inert=("cache_implementation",),
)
GEMMA3 = family.Family(
  model_type="gemma3_text",
  architecture="Gemma3ForCausalLM",
  read=_read_gemma3,
  inert=("cache_implementation",),
)
