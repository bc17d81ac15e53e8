"""Llama and families with its architecture: Mistral, Qwen 2, Qwen 3, Phi-3.

- Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024)
- Mistral 7B and Nemo (Jiang et al. 2023, https://arxiv.org/abs/2310.06825)
- Qwen 2 and 2.5 (Yang et al. 2024, https://arxiv.org/abs/2407.10671)
- Qwen 3 (Yang et al. 2025, https://arxiv.org/abs/2505.09388)
- Phi-3 and Phi-4-mini (Abdin et al. 2024, https://arxiv.org/abs/2404.14219).
  Their files fuse queries, keys and values, and the gate with the up
  projection.
"""

from collections.abc import Callable
import operator
from typing import Any

from paxon.layers.models.hugging_face import (
  attention_layers,
  family,
  gated_decoder,
  rope,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_decoder(
  fields: family.Fields,
  *,
  windows: tuple[int | None, ...],
  max_length: int,
  kv_heads: int | None = None,
  head_dim: int | None = None,
  epsilon: float = 1e-6,
  rope_options: dict[str, Any] | None = None,
  attention: dict[str, Any] | None = None,
  **features: Any,
) -> gated_decoder.GatedDecoder:
  """Reads the fields that these families share.

  The arguments are defaults of the file's fields; `rope_options` are further
  arguments of `rope.read`, `attention` further fields of `Attention`, and
  `features` those of `GatedDecoder`.
  """
  heads = attention_layers.read_heads(
    fields, kv_heads=kv_heads, head_dim=head_dim
  )
  return gated_decoder.GatedDecoder(
    vocab_size=fields.size("vocab_size"),
    embed_dim=fields.size("hidden_size"),
    mlp_dim=fields.size("intermediate_size"),
    attention=attention_layers.Attention(**heads, **(attention or {})),
    windows=windows,
    rope=rope.read(
      fields,
      head_dim=heads["head_dim"],
      max_length=fields.size("max_position_embeddings", max_length),
      **(rope_options or {}),
    ),
    activation=fields.activation("hidden_act", "silu"),
    epsilon=fields.number("rms_norm_eps", epsilon),
    tied=fields.flag("tie_word_embeddings", False),
    **features,
  )


def _read_llama(fields: family.Fields) -> gated_decoder.GatedDecoder:
  reject_window(fields)
  bias = fields.flag("attention_bias", False)
  return read_decoder(
    fields,
    windows=(None,) * fields.size("num_hidden_layers"),
    max_length=2048,
    attention={"qkv_bias": bias, "output_bias": bias},
    mlp_bias=fields.flag("mlp_bias", False),
  )


def _read_mistral(fields: family.Fields) -> gated_decoder.GatedDecoder:
  window = fields.optional_size("sliding_window", 4096)
  return read_decoder(
    fields,
    windows=(window,) * fields.size("num_hidden_layers"),
    max_length=131_072,
    kv_heads=8,
  )


def _read_qwen2(fields: family.Fields) -> gated_decoder.GatedDecoder:
  return read_decoder(
    fields,
    windows=read_windows(fields),
    max_length=32_768,
    kv_heads=32,
    attention={"qkv_bias": True},
  )


def _read_qwen3(fields: family.Fields) -> gated_decoder.GatedDecoder:
  bias = fields.flag("attention_bias", False)
  return read_decoder(
    fields,
    windows=read_windows(fields),
    max_length=32_768,
    kv_heads=32,
    head_dim=128,
    attention={
      "qkv_bias": bias,
      "output_bias": bias,
      "has_head_norm": True,
    },
  )


def _read_phi3(fields: family.Fields) -> gated_decoder.GatedDecoder:
  window = fields.optional_size("sliding_window", None)
  return read_decoder(
    fields,
    windows=(window,) * fields.size("num_hidden_layers"),
    max_length=4096,
    epsilon=1e-5,
    rope_options={
      "partial": 1.0,
      "original_length": 4096,
      "aliases": {"su": "longrope", "yarn": "longrope"},
    },
    attention={"is_fused": True},
    is_fused=True,
  )


def reject_window(fields: family.Fields) -> None:
  """Raises UnsupportedConfigError if a class without windows has one in use."""
  window = fields.get("sliding_window", None)
  if window is not None and fields.get("use_sliding_window", None) is not False:
    fields.reject("sliding_window", "None")


def read_window(fields: family.Fields) -> int | None:
  """Returns the sliding window of Qwen 2 and 3, or `None` if it is not used."""
  if fields.flag("use_sliding_window", False):
    return fields.optional_size("sliding_window", 4096)
  # Files may have 0.
  fields.get("sliding_window", None)
  return None


def read_windows(
  fields: family.Fields,
  *,
  has_window: Callable[[int, int], bool] = operator.ge,
) -> tuple[int | None, ...]:
  """Returns the sliding window of each layer of Qwen 2 and 3.

  `layer_types` takes precedence over `max_window_layers`. Without
  `use_sliding_window` no layer has one.

  Args:
    fields: Fields of the file.
    has_window: Whether a layer has a window, from its number and
      `max_window_layers`.

  Raises:
    UnsupportedConfigError: `layer_types` does not have a valid entry for each
      layer, or needs a window that is not set.
  """
  first = fields.count("max_window_layers", 28)
  num_layers = fields.size("num_hidden_layers")
  window = read_window(fields)
  kinds = fields.get("layer_types", None)
  if kinds is None:
    return tuple(
      window if has_window(i, first) else None for i in range(num_layers)
    )
  return read_layer_types(fields, window)


def read_layer_types(
  fields: family.Fields, window: int | None
) -> tuple[int | None, ...]:
  """Returns the window of each layer by `layer_types`.

  Raises:
    UnsupportedConfigError: It does not have a valid entry for each layer, or
      needs a window that is not set.
  """
  num_layers = fields.size("num_hidden_layers")
  kinds = fields.get("layer_types")
  if not isinstance(kinds, list) or len(kinds) != num_layers:
    fields.reject("layer_types", f"a list of {num_layers} types")
  if set(kinds) - {_FULL, _SLIDING}:
    fields.reject("layer_types", f"{_FULL!r} or {_SLIDING!r}")
  if _SLIDING in kinds and window is None:
    fields.reject("layer_types", f"{_FULL!r} without sliding_window")
  return tuple(window if kind == _SLIDING else None for kind in kinds)


LLAMA = family.Family(
  model_type="llama",
  architecture="LlamaForCausalLM",
  # The name before transformers had the class.
  other_architectures=("LLaMAForCausalLM",),
  read=_read_llama,
  # Length of pretraining in files of the first Llama.
  inert=("max_sequence_length",),
  # Written by nanotron, which has layers that the class does not have.
  neutral={
    "is_llama_config": (True,),
    "rope_interleaved": (False,),
    "use_sliding_window": (False,),
  },
)
MISTRAL = family.Family(
  model_type="mistral",
  architecture="MistralForCausalLM",
  read=_read_mistral,
  neutral={"attention_bias": (False,), "mlp_bias": (False,)},
)
QWEN2 = family.Family(
  model_type="qwen2",
  architecture="Qwen2ForCausalLM",
  read=_read_qwen2,
  # Multimodal rotation, which text models do not use.
  neutral={"use_mrope": (False,)},
)
QWEN3 = family.Family(
  model_type="qwen3", architecture="Qwen3ForCausalLM", read=_read_qwen3
)
PHI3 = family.Family(
  model_type="phi3",
  architecture="Phi3ForCausalLM",
  read=_read_phi3,
  # Written by the first code of the model, for layers that it might have had.
  neutral={
    "attention_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
  },
)
