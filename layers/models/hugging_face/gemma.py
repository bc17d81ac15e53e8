"""Gemma 1, 2 and 3 (text).

- Gemma (Gemma Team 2024, https://arxiv.org/abs/2403.08295)
- Gemma 2 (Gemma Team 2024, https://arxiv.org/abs/2408.00118)
- Gemma 3 (Gemma Team 2025, https://arxiv.org/abs/2503.19786)

Norms store their scale minus one. Embedded tokens are multiplied by the square
root of their width, rounded to the dtype of the model.
"""

import functools
from typing import Any

from paxon.layers import activations
from paxon.layers.models.hugging_face import block_layers, family, rope
from paxon.layers.models.hugging_face import decoder_table as table

_HEAD_DIM = 256
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Period of local and global layers in Gemma 3, unless the file sets it.
_GEMMA3_PERIOD = 6
# By type of layer: the field of the base in older files, and its default.
_GEMMA3_BASES = {
  _GLOBAL: ("rope_theta", 1_000_000.0),
  _LOCAL: ("rope_local_base_freq", 10_000.0),
}


def _read_activation(fields: family.Fields) -> activations.Activation:
  """Returns the activation of Gemma 1.

  Old files have "gelu" for its tanh approximation; newer ones repeat it in a
  second field, which some versions of transformers read.
  """
  supported = {**family.ACTIVATIONS, "gelu": activations.gelu_tanh}
  activation = fields.map_value("hidden_act", "gelu_pytorch_tanh", supported)
  repeated = {**supported, None: activation}
  if fields.map_value("hidden_activation", None, repeated) is not activation:
    fields.reject("hidden_activation", "null or the value of hidden_act")
  return activation


def _read_hidden_activation(fields: family.Fields) -> activations.Activation:
  """Returns the activation of Gemma 2 and 3.

  Some files repeat it in the field of other families.
  """
  activation = fields.activation("hidden_activation", "gelu_pytorch_tanh")
  repeated = {**family.ACTIVATIONS, None: activation}
  if fields.map_value("hidden_act", None, repeated) is not activation:
    fields.reject("hidden_act", "null or the value of hidden_activation")
  return activation


def _read_windows(
  fields: family.Fields, *, period: int | None
) -> tuple[int | None, ...]:
  """Returns the sliding window of each layer.

  Every `period`-th layer is global unless the file lists the types of layers;
  `None` reads the period from the file.
  """
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


def _windows(period: int | None) -> table.Field:
  return table.Field(functools.partial(_read_windows, period=period))


def _gemma3_rope(kind: str) -> table.Field:
  return table.Field(
    lambda fields: rope.read_kind(
      fields,
      kind,
      bases=_GEMMA3_BASES,
      head_dim=fields.optional_size("head_dim") or _HEAD_DIM,
      max_length=131_072,
    )
  )


# Bidirectional masks are for sentence embeddings, without a head.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False,)}
_COMMON: dict[str, Any] = {
  "head_dim": _HEAD_DIM,
  "norm": {"epsilon": table.number("rms_norm_eps", 1e-6), "offset": 1.0},
  "input_scale": table.Field(lambda fields: fields.size("hidden_size") ** 0.5),
  "tied": table.flag("tie_word_embeddings", True),
}
_COMMON_2_3: dict[str, Any] = {
  **_COMMON,
  "kv_heads": 4,
  "mlp": {"activation": table.Field(_read_hidden_activation)},
  "form": block_layers.SANDWICH,
}
_SCALE = table.Field(
  lambda fields: fields.number("query_pre_attn_scalar", 256) ** -0.5
)
GEMMA = table.make(
  "gemma",
  "GemmaForCausalLM",
  **_COMMON,
  neutral=_NEUTRAL,
  max_length=8192,
  kv_heads=16,
  attention=table.BIASES,
  mlp={"activation": table.Field(_read_activation)},
)
GEMMA2 = table.make(
  "gemma2",
  "Gemma2ForCausalLM",
  **_COMMON_2_3,
  inert=("cache_implementation",),
  neutral=_NEUTRAL,
  max_length=8192,
  windows=_windows(2),
  attention={
    **table.BIASES,
    "logit_scale": _SCALE,
    "logit_cap": table.optional_number("attn_logit_softcapping", 50.0),
  },
  logit_cap=table.optional_number("final_logit_softcapping", 30.0),
)
GEMMA3 = table.make(
  "gemma3_text",
  "Gemma3ForCausalLM",
  **_COMMON_2_3,
  # Written by transformers besides `layer_types`, and not read; the class reads
  # the cap of attention and does not use it.
  inert=("cache_implementation", "_sliding_window_pattern"),
  neutral={**_NEUTRAL, "attn_logit_softcapping": (None,)},
  max_length=131_072,
  rope=_gemma3_rope(_GLOBAL),
  local_rope=_gemma3_rope(_LOCAL),
  windows=_windows(None),
  attention={
    **table.BIASES,
    "logit_scale": _SCALE,
    "head_norm": "shared",
  },
  logit_cap=table.optional_number("final_logit_softcapping", None),
)
