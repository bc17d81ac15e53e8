"""Decoders without experts that differ from Llama in a few parts.

- Arcee, Cwm, ERNIE 4.5, Helium, Hunyuan, InternLM3, IQuest-Coder, Jais 2,
  Ministral, Seed-OSS, SmolLM3 and StarCoder2
- Granite
- Command R and R7B (Cohere)
- EXAONE 4, GLM-4 of both generations, Nemotron
- OLMo 1 (https://arxiv.org/abs/2402.00838), 2
  (https://arxiv.org/abs/2501.00656) and 3
- GPT-J, GPT-NeoX and Pythia (https://arxiv.org/abs/2204.06745), Phi-1 and 2,
  Persimmon, StableLM

Each is a table of what its class in transformers computes.
"""

from typing import Any

from paxon.layers.models.hugging_face import (
  attention_layers,
  block_layers,
  family,
  rope,
)
from paxon.layers.models.hugging_face import decoder_table as table

_INTERLEAVED = {"interleaved": True}
_PLAIN = {"is_gated": False}


def _every(period: int, name: str = "sliding_window_pattern") -> Any:
  """Returns whether a layer slides: all but every `period`-th do."""

  def is_sliding(i: int, fields: family.Fields) -> bool:
    step = fields.count(name, period) if name else period
    return bool(step and (i + 1) % step)

  return is_sliding


def _unrotated_full(windows: table.Field) -> table.Field:
  """Returns the layers without a window, which have no rotary positions."""
  return table.Field(
    lambda fields: tuple(
      i for i, window in enumerate(windows.read(fields)) if window is None
    )
  )


def _read_olmo3_rope(kind: str) -> table.Field:
  bases = dict.fromkeys(
    ("full_attention", "sliding_attention"), ("rope_theta", 500_000.0)
  )
  return table.Field(
    lambda fields: rope.read_kind(
      fields,
      kind,
      bases=bases,
      head_dim=fields.size("hidden_size") // fields.size("num_attention_heads"),
      max_length=2048,
    )
  )


def _read_hunyuan_rope(fields: family.Fields) -> rope.Rope:
  """Returns the rotary positions of Hunyuan.

  Files call it dynamic, but `alpha` sets the base for any length:
  `theta * alpha ** (d / (d - 2))` for heads of width `d`.
  """
  heads = attention_layers.read_heads(fields, kv_heads=None, head_dim=None)
  width = heads["head_dim"]
  for name in ("rope_scaling", "rope_parameters"):
    values = fields.get(name, None)
    if not isinstance(values, dict) or not values.get("alpha"):
      continue
    inner = family.Fields(values, architectures=("",))
    if values.get("rope_type", values.get("type")) != "dynamic":
      fields.reject(name, "an alpha of the type 'dynamic'")
    theta = fields.number("rope_theta", 10_000.0)
    theta = inner.number("rope_theta", theta)
    grown = theta * inner.number("alpha") ** (width / (width - 2))
    return rope.Rope(max_wavelength=grown)
  return rope.read(
    fields,
    head_dim=width,
    max_length=fields.size("max_position_embeddings", 2048),
  )


# Of both models, with experts and without.
HUNYUAN_ROPE = table.Field(_read_hunyuan_rope)


def _read_exaone_slides(i: int, fields: family.Fields) -> bool:
  """Returns whether a layer of EXAONE slides, for files without a list."""
  period = fields.get("sliding_window_pattern", 4)
  # Letters, which transformers reads only besides a list of the layers.
  if isinstance(period, str) and fields.get("layer_types", None) is not None:
    return False
  return _every(4)(i, fields)


def _read_unrotated(fields: family.Fields) -> tuple[int, ...]:
  """Returns the layers of SmolLM3 without rotary positions."""
  num_layers = fields.size("num_hidden_layers")
  step = fields.size("no_rope_layer_interval", 4)
  rotated = fields.get("no_rope_layers", None)
  if rotated is None:
    rotated = [int((i + 1) % step != 0) for i in range(num_layers)]
  valid = isinstance(rotated, list) and set(rotated) <= {0, 1}
  if not valid or len(rotated) != num_layers:
    fields.reject("no_rope_layers", f"a list of {num_layers} times 0 or 1")
  return tuple(i for i, each in enumerate(rotated) if not each)


def _read_smollm3_windows(fields: family.Fields) -> tuple[int | None, ...]:
  """Returns the windows of SmolLM3, by default of layers without positions."""
  window = fields.optional_size("sliding_window", None)
  has_windows = fields.flag("use_sliding_window", False)
  # transformers' masks follow the list, whatever the flag.
  if fields.get("layer_types", None) is not None:
    return table.read_layer_types(fields, window)
  if not has_windows:
    return table.FULL.read(fields)
  unrotated = _read_unrotated(fields)
  return tuple(
    window if i in unrotated else None
    for i in range(fields.size("num_hidden_layers"))
  )


ARCEE = table.make(
  "arcee",
  "ArceeForCausalLM",
  max_length=4096,
  epsilon=1e-5,
  attention=table.BIASES,
  mlp={
    **table.MLP_BIAS,
    **_PLAIN,
    "activation": table.activation("hidden_act", "relu2"),
  },
)
_COHERE_PARTS: dict[str, Any] = {
  "max_length": 8192,
  "norm": table.layer_norm(
    table.number("layer_norm_eps", 1e-5), has_bias=False
  ),
  "form": block_layers.PARALLEL,
  "logit_scale": table.number("logit_scale", 0.0625),
  "tied": table.flag("tie_word_embeddings", True),
}
COHERE = table.make(
  "cohere",
  "CohereForCausalLM",
  **_COHERE_PARTS,
  rope={**_INTERLEAVED, "theta": 500_000.0},
  attention={
    **table.BIASES,
    "head_norm": table.map_value(
      "use_qk_norm", False, {False: "", True: "separate"}
    ),
  },
)
_COHERE2_WINDOWS = table.sliding(4096, is_sliding=_every(4))
COHERE2 = table.make(
  "cohere2",
  "Cohere2ForCausalLM",
  **_COHERE_PARTS,
  rope=_INTERLEAVED,
  attention=table.BIASES,
  windows=_COHERE2_WINDOWS,
  unrotated=_unrotated_full(_COHERE2_WINDOWS),
)
_CWM_ROPE = {
  "rope_type": "llama3",
  "rope_theta": 1_000_000.0,
  "factor": 16.0,
  "high_freq_factor": 4.0,
  "low_freq_factor": 1.0,
  "original_max_position_embeddings": 8192,
}
CWM = table.make(
  "cwm",
  "CwmForCausalLM",
  max_length=131_072,
  epsilon=1e-5,
  kv_heads=8,
  head_dim=128,
  windows=table.sliding(8192, is_sliding=lambda i, fields: i % 4 != 0),
  rope={"theta": 1_000_000.0, "default": _CWM_ROPE},
  mlp=table.MLP_BIAS,
)
_USE_BIAS = table.flag("use_bias", False)
ERNIE4_5 = table.make(
  "ernie4_5",
  "Ernie4_5ForCausalLM",
  other_architectures=("Ernie4_5_ForCausalLM",),
  max_length=131_072,
  epsilon=1e-5,
  kv_heads=2,
  head_dim=128,
  null_shares=True,
  rope={**_INTERLEAVED, "theta": 500_000.0},
  attention={"qkv_bias": _USE_BIAS, "output_bias": _USE_BIAS},
  mlp={"use_bias": _USE_BIAS},
  tied=table.flag("tie_word_embeddings", True),
)
EXAONE_WINDOWS = table.sliding(4096, is_sliding=_read_exaone_slides)
# Models without any window rotate all layers.
EXAONE_UNROTATED = table.Field(
  lambda fields: (
    _unrotated_full(EXAONE_WINDOWS).read(fields)
    if fields.optional_size("sliding_window", 4096)
    else ()
  )
)
EXAONE4 = table.make(
  "exaone4",
  "Exaone4ForCausalLM",
  max_length=2048,
  epsilon=1e-5,
  kv_heads=32,
  form=block_layers.POST_NORM,
  windows=EXAONE_WINDOWS,
  unrotated=EXAONE_UNROTATED,
  attention={"head_norm": "shared"},
)
_GLM_PARTS: dict[str, Any] = {
  "max_length": 131_072,
  "epsilon": 1.5625e-07,
  "kv_heads": 2,
  "head_dim": 128,
  "rope": {**_INTERLEAVED, "partial": 0.5},
  "attention": {"qkv_bias": table.flag("attention_bias", True)},
  "mlp": {"is_fused": True},
}
GLM = table.make("glm", "GlmForCausalLM", **_GLM_PARTS)
GLM4 = table.make(
  "glm4",
  "Glm4ForCausalLM",
  **_GLM_PARTS,
  form=block_layers.Form(
    block_layers.SANDWICH.block,
    {
      "attention_norm": "input_layernorm",
      "post_attention_norm": "post_self_attn_layernorm",
      "feed_forward_norm": "post_attention_layernorm",
      "post_feed_forward_norm": "post_mlp_layernorm",
    },
  ),
)
GPTJ = table.make(
  "gptj",
  "GPTJForCausalLM",
  aliases={
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
  },
  max_length=2048,
  has_kv_heads=False,
  norm=table.layer_norm(table.number("layer_norm_epsilon", 1e-5)),
  rope=table.Field(
    lambda fields: rope.Rope(
      max_wavelength=10_000.0,
      rotary_dim=fields.optional_size("rotary_dim", 64),
      interleaved=True,
    )
  ),
  form=block_layers.PARALLEL,
  mlp={
    **_PLAIN,
    "mlp_dim": table.Field(
      lambda fields: (
        fields.optional_size("n_inner") or 4 * fields.size("hidden_size")
      )
    ),
    "activation": table.activation("activation_function", "gelu_new"),
    "use_bias": True,
  },
  head_bias=True,
  tensors={
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn": "attn",
    "up_proj": "fc_in",
    "down_proj": "fc_out",
    "model.": "transformer.",
  },
  ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
)
_NEOX_BIAS = table.flag("attention_bias", True)
GPT_NEOX = table.make(
  "gpt_neox",
  "GPTNeoXForCausalLM",
  inert=("is_decoder",),
  max_length=2048,
  has_kv_heads=False,
  norm=table.layer_norm(table.number("layer_norm_eps", 1e-5)),
  rope={
    "partial": 0.25,
    "theta_field": "rotary_emb_base",
    "partial_field": "rotary_pct",
  },
  attention={
    "qkv_bias": _NEOX_BIAS,
    "output_bias": _NEOX_BIAS,
    "fused": "heads",
  },
  form=table.map_value(
    "use_parallel_residual",
    True,
    {False: block_layers.PRE_NORM, True: block_layers.PARALLEL_NORMS},
  ),
  mlp={
    **_PLAIN,
    "use_bias": True,
    "activation": table.activation("hidden_act", "gelu"),
  },
  tensors={
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.norm": "gpt_neox.final_layer_norm",
    "model.": "gpt_neox.",
    "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "lm_head": "embed_out",
  },
  # Masks and frequencies in old files.
  ignored=(
    r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)",
    r"gpt_neox\.layers\.\d+\.attention\.rotary_emb\.inv_freq",
  ),
)
_GRANITE_PARTS: dict[str, Any] = {
  "max_length": 2048,
  "mlp": table.MLP_BIAS,
  "input_scale": table.number("embedding_multiplier", 1.0),
  "residual_scale": table.number("residual_multiplier", 1.0),
}
GRANITE = table.make(
  "granite",
  "GraniteForCausalLM",
  **_GRANITE_PARTS,
  attention={
    **table.BIASES,
    "logit_scale": table.number("attention_multiplier", 1.0),
  },
  logit_scale=table.Field(
    lambda fields: 1 / fields.number("logits_scaling", 1.0)
  ),
)
HELIUM = table.make(
  "helium",
  "HeliumForCausalLM",
  max_length=4096,
  epsilon=1e-8,
  kv_heads=20,
  head_dim=128,
  rope={**_INTERLEAVED, "theta": 100_000.0},
  attention={"qkv_bias": table.ATTENTION_BIAS},
  mlp=table.MLP_BIAS,
)
HUNYUAN_DENSE = table.make(
  "hunyuan_v1_dense",
  "HunYuanDenseV1ForCausalLM",
  inert=("eod_token_id",),
  max_length=2048,
  rope=HUNYUAN_ROPE,
  epsilon=1e-5,
  attention={**table.BIASES, "head_norm": "shared", "norm_after_rotary": True},
  tensors={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
)
INTERNLM3 = table.make(
  "internlm3",
  "InternLM3ForCausalLM",
  aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
  max_length=32_768,
  epsilon=1e-5,
  kv_heads=2,
  head_dim=128,
  attention=table.BIASES,
  mlp=table.MLP_BIAS,
)
IQUEST_CODER = table.make(
  "iquestcoder",
  "IQuestCoderForCausalLM",
  max_length=131_072,
  epsilon=1e-5,
  kv_heads=8,
  head_dim=128,
  attention=table.BIASES,
  mlp=table.MLP_BIAS,
)
JAIS2 = table.make(
  "jais2",
  "Jais2ForCausalLM",
  max_length=8192,
  norm=table.layer_norm(table.number("layer_norm_eps", 1e-5)),
  attention=dict.fromkeys(
    ("qkv_bias", "output_bias"), table.flag("attention_bias", True)
  ),
  mlp={
    **_PLAIN,
    "use_bias": table.flag("mlp_bias", True),
    "activation": table.activation("hidden_act", "relu2"),
  },
)
MINISTRAL = table.make(
  "ministral",
  "MinistralForCausalLM",
  max_length=131_072,
  kv_heads=8,
  windows=table.sliding(4096, is_sliding=lambda i, fields: True),
)
NEMOTRON = table.make(
  "nemotron",
  "NemotronForCausalLM",
  max_length=4096,
  # The stored scale is the scale minus one.
  norm={**table.layer_norm(table.number("norm_eps", 1e-5)), "offset": 1.0},
  rope={"partial": 0.5},
  attention=table.BIASES,
  mlp={
    **table.MLP_BIAS,
    **_PLAIN,
    "activation": table.activation("hidden_act", "relu2"),
  },
)
_OLMO_ATTENTION = {**table.BIASES, "head_norm": "width"}
OLMO = table.make(
  "olmo",
  "OlmoForCausalLM",
  max_length=2048,
  norm={"epsilon": 1e-5, "subtracts_mean": True, "has_scale": False},
  attention={
    **table.BIASES,
    "qkv_limit": table.optional_number("clip_qkv", None),
  },
)
OLMO2 = table.make(
  "olmo2",
  "Olmo2ForCausalLM",
  max_length=2048,
  epsilon=1e-5,
  form=block_layers.POST_NORM,
  attention=_OLMO_ATTENTION,
)
OLMO3 = table.make(
  "olmo3",
  "Olmo3ForCausalLM",
  max_length=2048,
  epsilon=1e-5,
  form=block_layers.POST_NORM,
  attention=_OLMO_ATTENTION,
  windows=table.sliding(4096, is_sliding=_every(4, name="")),
  rope=_read_olmo3_rope("full_attention"),
  local_rope=_read_olmo3_rope("sliding_attention"),
)
PERSIMMON = table.make(
  "persimmon",
  "PersimmonForCausalLM",
  max_length=16_384,
  has_kv_heads=False,
  norm=table.layer_norm(table.number("layer_norm_eps", 1e-5)),
  rope={"partial": 0.5},
  attention={
    "qkv_bias": True,
    "output_bias": True,
    "fused": "heads",
    "head_norm": table.map_value(
      "qk_layernorm", True, {False: "", True: "shared"}
    ),
  },
  mlp={
    **_PLAIN,
    "use_bias": True,
    "activation": table.activation("hidden_act", "relu2"),
  },
  tensors={
    "model.norm": "model.final_layernorm",
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
  },
)
PHI = table.make(
  "phi",
  "PhiForCausalLM",
  max_length=2048,
  neutral={"qk_layernorm": (False,)},
  norm=table.layer_norm(table.number("layer_norm_eps", 1e-5)),
  rope={"partial": 0.5},
  form=block_layers.PARALLEL,
  attention={"qkv_bias": True, "output_bias": True},
  mlp={
    **_PLAIN,
    "use_bias": True,
    "activation": table.activation("hidden_act", "gelu_new"),
  },
  head_bias=True,
  tensors={
    "model.norm": "model.final_layernorm",
    "o_proj": "dense",
    "up_proj": "fc1",
    "down_proj": "fc2",
  },
)
SEED_OSS = table.make(
  "seed_oss",
  "SeedOssForCausalLM",
  inert=("residual_dropout",),
  max_length=524_288,
  kv_heads=8,
  head_dim=128,
  null_shares=True,
  attention={
    "qkv_bias": table.flag("attention_bias", True),
    "output_bias": table.flag("attention_out_bias", False),
  },
  mlp=table.MLP_BIAS,
)
SMOLLM3 = table.make(
  "smollm3",
  "SmolLM3ForCausalLM",
  max_length=32_768,
  kv_heads=4,
  rope={"theta": 2_000_000.0},
  attention=table.BIASES,
  mlp=table.MLP_BIAS,
  windows=table.Field(_read_smollm3_windows),
  unrotated=table.Field(_read_unrotated),
  tied=table.flag("tie_word_embeddings", True),
)
STABLELM = table.make(
  "stablelm",
  "StableLmForCausalLM",
  neutral={"qk_layernorm": (False,)},
  max_length=4096,
  kv_heads=32,
  norm=table.layer_norm(table.number("layer_norm_eps", 1e-5)),
  rope={"partial": 0.25},
  attention={"qkv_bias": table.flag("use_qkv_bias", False)},
  form=table.map_value(
    "use_parallel_residual",
    False,
    {False: block_layers.PRE_NORM, True: block_layers.PARALLEL},
  ),
)
_STARCODER_BIAS = table.flag("use_bias", True)
STARCODER2 = table.make(
  "starcoder2",
  "Starcoder2ForCausalLM",
  inert=("residual_dropout",),
  max_length=4096,
  kv_heads=2,
  norm=table.layer_norm(table.number("norm_epsilon", 1e-5)),
  windows=table.sliding(None),
  attention={"qkv_bias": _STARCODER_BIAS, "output_bias": _STARCODER_BIAS},
  mlp={
    **_PLAIN,
    "use_bias": _STARCODER_BIAS,
    "activation": table.activation("hidden_act", "gelu_pytorch_tanh"),
  },
  tied=table.flag("tie_word_embeddings", True),
  tensors={"up_proj": "c_fc", "down_proj": "c_proj"},
)
