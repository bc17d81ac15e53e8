"""Decoders of 2021 to 2023, with learned positions or ALiBi, and Falcon.

- BLOOM (https://arxiv.org/abs/2211.05100) and MPT, with ALiBi
- Falcon (https://arxiv.org/abs/2311.16867), 7B and from 40B on
- OPT (https://arxiv.org/abs/2205.01068), GPT-Neo, and StarCoder 1 and
  SantaCoder (GPT-BigCode), with learned positions

Each is a table of what its class in transformers computes.
"""

from typing import Any

from paxon.layers import activations
from paxon.layers.models.hugging_face import block_layers, family
from paxon.layers.models.hugging_face import decoder_table as table

_BIASES = {"qkv_bias": True, "output_bias": True}
# Four times the width, unless the file has another one.
_INNER = table.Field(
  lambda fields: (
    fields.optional_size("n_inner") or 4 * fields.size("hidden_size")
  )
)
_FOUR_TIMES = table.Field(lambda fields: 4 * fields.size("hidden_size"))
_TIED = table.flag("tie_word_embeddings", True)
_BLOOM_NAMES = {
  "model.embed_tokens": "transformer.word_embeddings",
  "model.embed_norm": "transformer.word_embeddings_layernorm",
  "model.norm": "transformer.ln_f",
  "model.layers": "transformer.h",
  "model.": "transformer.",
  "self_attn.qkv_proj": "self_attention.query_key_value",
  "self_attn.o_proj": "self_attention.dense",
  "up_proj": "dense_h_to_4h",
  "down_proj": "dense_4h_to_h",
}
_GPT_NAMES = {
  "model.embed_tokens": "transformer.wte",
  "model.embed_positions": "transformer.wpe",
  "model.norm": "transformer.ln_f",
  "model.layers": "transformer.h",
  "model.": "transformer.",
  "input_layernorm": "ln_1",
  "post_attention_layernorm": "ln_2",
  "mlp.up_proj": "mlp.c_fc",
  "mlp.down_proj": "mlp.c_proj",
}


def _read_kv_heads(fields: family.Fields) -> int:
  """Returns the heads of keys and values of Falcon."""
  num_heads = fields.size("num_attention_heads")
  given = fields.optional_size("num_kv_heads")
  has_one = fields.flag("multi_query", True, null=False)
  if fields.flag("new_decoder_architecture", False):
    if num_heads % (given or num_heads):
      fields.reject("num_kv_heads", f"a divisor of {num_heads} heads")
    return given or num_heads
  return 1 if has_one else num_heads


def _read_falcon_rows(fields: family.Fields) -> str:
  if fields.flag("new_decoder_architecture", False):
    return "groups"
  return "rows" if fields.flag("multi_query", True, null=False) else "heads"


def _read_falcon_form(fields: family.Fields) -> block_layers.Form:
  is_new = fields.flag("new_decoder_architecture", False)
  num_norms = fields.optional_size("num_ln_in_parallel_attn")
  is_parallel = fields.flag("parallel_attn", True, null=False)
  if num_norms not in (None, 1, 2):
    fields.reject("num_ln_in_parallel_attn", "1 or 2")
  if is_new and num_norms != 1:
    return block_layers.Form(
      block_layers.PARALLEL.block,
      {"norm": "ln_attn", "feed_forward_norm": "ln_mlp"},
    )
  if num_norms == 2:
    fields.reject("num_ln_in_parallel_attn", "1 without the new architecture")
  return block_layers.PARALLEL if is_parallel else block_layers.PRE_NORM


def _read_mpt_attention(fields: family.Fields) -> dict[str, Any]:
  """Returns the attention of MPT, by `attn_config`."""
  given = fields.get("attn_config", None) or {}
  if not isinstance(given, dict):
    fields.reject("attn_config", "an object")
  inner = family.Fields(
    given,
    architectures=("",),
    inert=("attn_pdrop", "attn_impl", "attn_type", "attn_uses_sequence_id"),
    neutral={
      "alibi": (True,),
      "alibi_bias_max": (8,),
      "prefix_lm": (False,),
      "qk_ln": (False,),
    },
  )
  num_heads = fields.size("num_attention_heads")
  # The slopes of others are in another order than those of BLOOM.
  if num_heads & (num_heads - 1):
    fields.reject("n_heads", "a power of two")
  found = {
    "fused": "rows",
    "has_alibi": True,
    "qkv_limit": inner.optional_number("clip_qkv", None),
    "logit_scale": inner.optional_number("softmax_scale", None),
  }
  for name in inner.find_ignored():
    fields.ignore(f"attn_config.{name}")
  return found


def _read_windows(fields: family.Fields) -> tuple[int | None, ...]:
  """Returns the windows of GPT-Neo: `attention_types` is [[kinds, count], ...].

  Raises:
    UnsupportedConfigError: It does not have one kind for each layer.
  """
  num_layers = fields.size("num_hidden_layers")
  window = fields.size("window_size", 256)
  given = fields.value("attention_types", [[["global", "local"], 12]])
  # Made from the types; it counts where a file has both.
  kinds = fields.get("attention_layers", None)
  try:
    if kinds is None:
      kinds = [kind for part, count in given for kind in part * count]
    valid = len(kinds) == num_layers and set(kinds) <= {"global", "local"}
  except (TypeError, ValueError):
    valid = False
  if not valid:
    fields.reject(
      "attention_types", f"'global' or 'local' for {num_layers} layers"
    )
  return tuple(window if kind == "local" else None for kind in kinds)


def _reject_projection(fields: family.Fields) -> None:
  """Raises UnsupportedConfigError if an OPT has embeddings of another width."""
  width = fields.size("hidden_size")
  if fields.value("word_embed_proj_dim", width) != width:
    fields.reject("word_embed_proj_dim", f"hidden_size ({width})")


BLOOM = table.make(
  "bloom",
  "BloomForCausalLM",
  aliases={
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
  },
  inert=("attention_softmax_in_fp32", "masked_softmax_fusion"),
  neutral={
    "apply_residual_connection_post_layernorm": (False,),
    # Leaves biases out in transformers.
    "slow_but_exact": (False,),
  },
  max_length=None,
  has_kv_heads=False,
  rope=None,
  norm=table.layer_norm(table.number("layer_norm_epsilon", 1e-5)),
  embedding_norm=True,
  attention={**_BIASES, "fused": "heads", "has_alibi": True},
  mlp={
    "is_gated": False,
    "mlp_dim": _FOUR_TIMES,
    "activation": activations.gelu_tanh,
    "use_bias": True,
  },
  tied=_TIED,
  tensors=_BLOOM_NAMES,
)
FALCON = table.make(
  "falcon",
  "FalconForCausalLM",
  aliases={
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
  },
  # Its ALiBi is scaled as logits are.
  neutral={
    "alibi": (False,),
    "apply_residual_connection_post_layernorm": (False,),
  },
  max_length=2048,
  has_kv_heads=False,
  norm=table.layer_norm(table.number("layer_norm_epsilon", 1e-5)),
  form=table.Field(_read_falcon_form),
  attention={
    "num_kv_heads": table.Field(_read_kv_heads),
    "fused": table.Field(_read_falcon_rows),
    "qkv_bias": table.flag("bias", False),
    "output_bias": table.flag("bias", False),
  },
  mlp={
    "is_gated": False,
    "mlp_dim": table.Field(
      lambda fields: (
        fields.optional_size("ffn_hidden_size")
        or 4 * fields.size("hidden_size")
      )
    ),
    "activation": table.activation("activation", "gelu"),
    "use_bias": table.flag("bias", False),
  },
  tied=_TIED,
  tensors=_BLOOM_NAMES,
)
GPT_BIGCODE = table.make(
  "gpt_bigcode",
  "GPTBigCodeForCausalLM",
  aliases={
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
  },
  # How a softmax is rounded in half precision.
  inert=(
    "attention_softmax_in_fp32",
    "num_key_value_heads",
    "scale_attention_softmax_in_fp32",
  ),
  neutral={"scale_attn_weights": (True,)},
  max_length=1024,
  has_kv_heads=False,
  rope=None,
  position_offset=0,
  norm=table.layer_norm(table.number("layer_norm_epsilon", 1e-5)),
  attention={
    **_BIASES,
    "num_kv_heads": table.Field(
      lambda fields: (
        1
        if fields.flag("multi_query", True, null=False)
        else fields.size("num_attention_heads")
      )
    ),
    "fused": table.map_value(
      "multi_query", True, {True: "rows", False: "heads", None: "heads"}
    ),
  },
  mlp={
    "is_gated": False,
    "mlp_dim": _INNER,
    "activation": table.activation("activation_function", "gelu_pytorch_tanh"),
    "use_bias": True,
  },
  tied=_TIED,
  tensors={
    **_GPT_NAMES,
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
  },
)
GPT_NEO = table.make(
  "gpt_neo",
  "GPTNeoForCausalLM",
  aliases={
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
  },
  inert=("resid_dropout", "embed_dropout"),
  max_length=2048,
  has_kv_heads=False,
  rope=None,
  position_offset=0,
  norm=table.layer_norm(table.number("layer_norm_epsilon", 1e-5)),
  windows=table.Field(_read_windows),
  # Logits are not scaled.
  attention={"output_bias": True, "logit_scale": 1.0},
  mlp={
    "is_gated": False,
    "mlp_dim": table.Field(
      lambda fields: (
        fields.optional_size("intermediate_size")
        or 4 * fields.size("hidden_size")
      )
    ),
    "activation": table.activation("activation_function", "gelu_new"),
    "use_bias": True,
  },
  tied=_TIED,
  tensors={
    **_GPT_NAMES,
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn.": "attn.attention.",
  },
  ignored=(r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)",),
)
MPT = table.make(
  "mpt",
  "MptForCausalLM",
  # The name before transformers had the class.
  other_architectures=("MPTForCausalLM",),
  aliases={
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
  },
  inert=(
    *("emb_pdrop", "embedding_fraction", "init_device", "max_seq_len"),
    *("learned_pos_emb", "init_config", "expansion_ratio"),
  ),
  neutral={
    "logit_scale": (None,),
    "no_bias": (True,),
    "norm_type": ("low_precision_layernorm",),
  },
  max_length=None,
  has_kv_heads=False,
  rope=None,
  norm=table.layer_norm(
    table.number("layer_norm_epsilon", 1e-5), has_bias=False
  ),
  attention=table.Field(_read_mpt_attention),
  mlp={
    "is_gated": False,
    "mlp_dim": _FOUR_TIMES,
    "activation": activations.gelu_exact,
  },
  tied=_TIED,
  tensors={
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.norm_f",
    "model.layers": "transformer.blocks",
    "model.": "transformer.",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.qkv_proj": "attn.Wqkv",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.": "ffn.",
  },
)
_OPT_BIAS = table.flag("enable_bias", True)
OPT = table.make(
  "opt",
  "OPTForCausalLM",
  aliases={"ffn_dim": "intermediate_size"},
  inert=("dropout", "layerdrop", "init_std"),
  # The 350M model has its norms after each part, and no last one.
  neutral={
    "_remove_final_layer_norm": (False,),
    "do_layer_norm_before": (True,),
    "layer_norm_elementwise_affine": (True,),
  },
  max_length=2048,
  has_kv_heads=False,
  rope=table.Field(_reject_projection),
  position_offset=2,
  norm=table.layer_norm(1e-5),
  attention={"qkv_bias": _OPT_BIAS, "output_bias": _OPT_BIAS},
  mlp={
    "is_gated": False,
    "activation": table.activation("activation_function", "relu"),
    "use_bias": _OPT_BIAS,
  },
  tied=_TIED,
  tensors={
    "model.embed": "model.decoder.embed",
    "model.norm": "model.decoder.final_layer_norm",
    "model.layers": "model.decoder.layers",
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "o_proj": "out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
  },
)
