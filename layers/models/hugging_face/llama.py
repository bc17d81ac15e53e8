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

from paxon.layers.models.hugging_face import decoder_table, family


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
  return decoder_table.read_layer_types(fields, window)


# Classes without windows.
FULL = decoder_table.Field(
  lambda fields: reject_window(fields) or decoder_table.FULL.read(fields)
)
LLAMA = decoder_table.make(
  "llama",
  "LlamaForCausalLM",
  # The name before transformers had the class.
  other_architectures=("LLaMAForCausalLM",),
  # Length of pretraining in files of the first Llama.
  inert=("max_sequence_length",),
  # Written by nanotron, which has layers that the class does not have.
  neutral={
    "is_llama_config": (True,),
    "rope_interleaved": (False,),
    "use_sliding_window": (False,),
  },
  max_length=2048,
  windows=FULL,
  attention=decoder_table.BIASES,
  mlp=decoder_table.MLP_BIAS,
)
MISTRAL = decoder_table.make(
  "mistral",
  "MistralForCausalLM",
  neutral={"attention_bias": (False,), "mlp_bias": (False,)},
  max_length=131_072,
  kv_heads=8,
  windows=decoder_table.sliding(4096),
)
QWEN2 = decoder_table.make(
  "qwen2",
  "Qwen2ForCausalLM",
  # Multimodal rotation, which text models do not use.
  neutral={"use_mrope": (False,)},
  max_length=32_768,
  kv_heads=32,
  windows=decoder_table.Field(read_windows),
  attention={"qkv_bias": True},
)
QWEN3 = decoder_table.make(
  "qwen3",
  "Qwen3ForCausalLM",
  max_length=32_768,
  kv_heads=32,
  head_dim=128,
  windows=decoder_table.Field(read_windows),
  attention={**decoder_table.BIASES, "head_norm": "shared"},
)
PHI3 = decoder_table.make(
  "phi3",
  "Phi3ForCausalLM",
  # Written by the first code of the model, for layers that it might have had.
  neutral={
    "attention_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
  },
  max_length=4096,
  epsilon=1e-5,
  windows=decoder_table.sliding(None),
  rope={
    "partial": 1.0,
    "original_length": 4096,
    "aliases": {"su": "longrope", "yarn": "longrope"},
  },
  attention={"fused": "rows"},
  mlp={"is_fused": True},
)
