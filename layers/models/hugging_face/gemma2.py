"""Gemma 2 (Gemma Team 2024, https://arxiv.org/abs/2408.00118)."""

from collections.abc import Mapping
from typing import Any

from paxon.layers.models.hugging_face import (
  activations,
  config_fields,
  family,
  gated_decoder,
  gemma,
  rope,
)

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Of Gemma 3.
_PERIOD = 6


def common(
  fields: config_fields.Fields, *, period: int | None
) -> dict[str, Any]:
  """Returns what Gemma 2 and 3 have in common, as fields of `GatedDecoder`.

  Args:
    fields: Of the file.
    period: Of so many layers the last one sees all positions, where the file
      does not list them; `None` is what the file says, or that of Gemma 3.

  Raises:
    UnservedConfigError: A field has a value that is not served.
  """
  return {
    **gemma.common(fields, kv_heads=4),
    "windows": _windows(fields, period),
    "activation": _activation(fields),
    "logit_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
    "has_post_norms": True,
  }


def optional_number(
  fields: config_fields.Fields, name: str, default: float | None
) -> float | None:
  """Returns a positive number, or `None` for null.

  Args:
    fields: Of the file.
    name: Of the field.
    default: Where the file does not give it.

  Raises:
    UnservedConfigError: The value is neither.
  """
  if fields.any(name, default) is None:
    return None
  return fields.number(name, default)


def _read(config: Mapping[str, Any]) -> gated_decoder.GatedDecoder:
  fields = config_fields.Fields(
    config, architecture=FAMILY.architecture, inert=("cache_implementation",)
  )
  parts = common(fields, period=2)
  result = gated_decoder.GatedDecoder(
    **parts,
    rope=rope.read(
      fields,
      head_dim=parts["head_dim"],
      max_length=fields.size("max_position_embeddings", 8192),
    ),
    attention_cap=optional_number(fields, "attn_logit_softcapping", 50.0),
    logit_cap=optional_number(fields, "final_logit_softcapping", 30.0),
  )
  fields.check_all_read()
  return result


def _windows(
  fields: config_fields.Fields, period: int | None
) -> tuple[int | None, ...]:
  """Returns how many positions each layer sees."""
  num_layers = fields.size("num_hidden_layers")
  name = "sliding_window_pattern"
  period = fields.size(name, _PERIOD) if period is None else period
  by_period = [
    _LOCAL if (i + 1) % period else _GLOBAL for i in range(num_layers)
  ]
  kinds = fields.any("layer_types", None)
  kinds = by_period if kinds is None else kinds
  is_list = isinstance(kinds, list) and len(kinds) == num_layers
  if not is_list or any(kind not in (_LOCAL, _GLOBAL) for kind in kinds):
    fields.refuse(
      "layer_types", f"{num_layers} times {_LOCAL!r} or {_GLOBAL!r}"
    )
  if fields.has(name) and kinds != by_period:
    fields.refuse(name, "a period that agrees with layer_types")
  window = fields.optional_size("sliding_window", 4096)
  if window is None and _LOCAL in kinds:
    fields.refuse("sliding_window", f"a positive integer beside {_LOCAL!r}")
  if fields.any("sliding_window_size", window) != window:
    fields.refuse("sliding_window_size", f"sliding_window ({window})")
  return tuple(window if kind == _LOCAL else None for kind in kinds)


def _activation(fields: config_fields.Fields) -> activations.Activation:
  served = activations.SERVED
  result = fields.one_of("hidden_activation", "gelu_pytorch_tanh", served)
  # Some files repeat it in the field of other families.
  again = fields.one_of("hidden_act", None, {**served, None: result})
  if again is not result:
    fields.refuse("hidden_act", "null or the activation of hidden_activation")
  return result


FAMILY = family.Family(
  model_type="gemma2",
  architecture="Gemma2ForCausalLM",
  read=_read,
)
