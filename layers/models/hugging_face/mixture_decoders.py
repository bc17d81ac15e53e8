"""Decoders with many fine-grained experts, since 2024.

- dots.llm1, ERNIE 4.5 (https://ernie.baidu.com/blog/publication), EXAONE with
  experts, GLM-4.5 and 4.6 (https://arxiv.org/abs/2508.06471), Kimi K2
  (https://arxiv.org/abs/2507.20534), Solar Open: sigmoid routers with a bias
  that selects, and shared experts
- FlexOlmo, Hunyuan-A13B, MiniMax M2
- GLM-4.7-Flash, and Youtu without experts, with latent attention

Each is a table of what its class in transformers computes.
"""

import dataclasses
from typing import Any

from paxon.layers.models.hugging_face import (
  block_layers,
  deepseek,
  dense_decoders,
  expert_layers,
  family,
  latent_layers,
  rope,
)
from paxon.layers.models.hugging_face import decoder_table as table

# Added to the sum of the chosen scores.
_EPSILON = 1e-20


def _read_sigmoid(
  fields: family.Fields,
  *,
  experts: tuple[str, int | None] = ("n_routed_experts", 128),
  shared: tuple[str, int | None] = ("n_shared_experts", 1),
  chosen: int | None = 8,
  mlp_dim: int = 1408,
  normalize: bool = True,
  scale: float = 1.0,
) -> expert_layers.Experts:
  """Returns experts as those of DeepSeek-V3; arguments are defaults.

  Raises:
    UnsupportedConfigError: A token chooses more experts than there are.
  """
  groups = deepseek.read_groups(
    fields,
    num_summed=2,
    defaults=(1, 1),
    experts=experts,
    num_chosen=chosen,
  )
  width = fields.size("moe_intermediate_size", mlp_dim)
  num_shared = fields.optional_size(*shared)
  return expert_layers.Experts(
    num_experts=fields.size(*experts),
    num_chosen=fields.size("num_experts_per_tok", chosen),
    mlp_dim=width,
    normalize=fields.flag("norm_topk_prob", normalize),
    balance_weight=0.0,
    epsilon=_EPSILON,
    scale=fields.number("routed_scaling_factor", scale),
    groups=groups,
    is_sigmoid=True,
    has_selection_bias=True,
    shared_dim=None if num_shared is None else num_shared * width,
    has_shared_gate=False,
    shared_at="mlp.shared_experts",
  )


def _sigmoid(**defaults: Any) -> table.Field:
  return table.Field(lambda fields: _read_sigmoid(fields, **defaults))


def _latent(max_length: int, **defaults: int) -> dict[str, Any]:
  """Returns latent attention and its rotary positions, for a table."""

  def read_rope(fields: family.Fields) -> rope.Rope:
    return rope.read(
      fields,
      head_dim=fields.size("qk_rope_head_dim", 64),
      max_length=fields.size("max_position_embeddings", max_length),
      interleaved=fields.flag("rope_interleave", True, null=False),
    )

  return {
    "neutral": {"attention_bias": (False,)},
    # They follow from the widths of the parts of a head.
    "inert": (
      *("head_dim", "num_key_value_heads", "output_router_logits"),
      *("embedding_initializer_range", "qk_head_dim"),
    ),
    "max_length": max_length,
    "rope": table.Field(read_rope),
    "attention": table.Field(
      lambda fields: latent_layers.read(fields, **defaults)
    ),
  }


def _first_dense(default: int) -> table.Field:
  """Returns the dense layers, which come first."""
  return table.Field(
    lambda fields: tuple(
      range(
        min(
          fields.count("first_k_dense_replace", default),
          fields.size("num_hidden_layers"),
        )
      )
    )
  )


def _softmax(
  *, experts: tuple[str, int], chosen: int, mlp: tuple[str, int], **more: Any
) -> table.Field:
  """Returns experts with a softmax; arguments are defaults and fields."""

  def read(fields: family.Fields) -> expert_layers.Experts:
    return expert_layers.Experts(
      **expert_layers.read_router(
        fields,
        experts_field=experts[0],
        num_experts=experts[1],
        num_chosen=chosen,
        balance_weight=0.001,
      ),
      mlp_dim=fields.size(*mlp),
      **table.resolve(more, fields),
    )

  return table.Field(read)


def _read_ernie_experts(fields: family.Fields) -> expert_layers.Experts:
  width = fields.size("moe_intermediate_size", 1536)
  num_shared = fields.count("moe_num_shared_experts", 2)
  # A lower bound of sums, which no sum of probabilities falls below.
  fields.number("moe_norm_min", 1e-12)
  return expert_layers.Experts(
    **expert_layers.read_router(
      fields,
      experts_field="num_experts",
      num_experts=64,
      num_chosen=6,
      balance_weight=0.001,
    ),
    mlp_dim=width,
    normalize=True,
    has_selection_bias=True,
    selection_bias="O E -> (O E)",
    shared_dim=num_shared * width or None,
    has_shared_gate=False,
    shared_at="mlp.shared_experts",
  )


def _read_ernie_dense(fields: family.Fields) -> tuple[int, ...]:
  num_layers = fields.size("num_hidden_layers")
  step = fields.size("moe_layer_interval", 1)
  first = fields.count("moe_layer_start_index", 1)
  last = fields.get("moe_layer_end_index", -1)
  if not isinstance(last, int) or isinstance(last, bool) or last < -1:
    fields.reject("moe_layer_end_index", "an integer of at least -1")
  last = num_layers - 1 if last == -1 else last
  return tuple(
    i for i in range(num_layers) if (i + 1) % step or not first <= i <= last
  )


def _read_hunyuan_experts(fields: family.Fields) -> expert_layers.Experts:
  width = fields.size("intermediate_size", 11_008)
  sizes = {}
  for name in ("num_experts", "moe_topk"):
    value = fields.value(name, 1)
    # Layers may differ there, which no published model does.
    each = value if isinstance(value, list) and value else [value]
    valid = isinstance(each[0], int) and each[0] > 0
    if not valid or any(x != each[0] for x in each):
      fields.reject(name, "a positive integer, or a list of equal ones")
    sizes[name] = each[0]
  if sizes["moe_topk"] > sizes["num_experts"]:
    fields.reject("moe_topk", f"at most num_experts ({sizes['num_experts']})")
  return expert_layers.Experts(
    num_experts=sizes["num_experts"],
    num_chosen=sizes["moe_topk"],
    mlp_dim=width,
    normalize=True,
    balance_weight=0.0,
    shared_dim=width,
    has_shared_gate=False,
    shared_at="mlp.shared_mlp",
  )


def _read_lite_dense(fields: family.Fields) -> tuple[int, ...]:
  if fields.get("mlp_layer_types", None) is None:
    return (0,)
  return table.read_kinds(fields, "mlp_layer_types", "dense", "sparse")


def _read_exaone_dense(fields: family.Fields) -> tuple[int, ...]:
  first = _first_dense(1).read(fields)
  if fields.get("mlp_layer_types", None) is None:
    return first
  return table.read_kinds(fields, "mlp_layer_types", "dense", "sparse")


DOTS1 = table.make(
  "dots1",
  "Dots1ForCausalLM",
  aliases={"num_local_experts": "n_routed_experts"},
  inert=("output_router_logits",),
  max_length=2048,
  kv_heads=32,
  windows=table.sliding(
    4096,
    is_sliding=lambda i, fields: i >= fields.count("max_window_layers", 62),
  ),
  attention={**table.BIASES, "head_norm": "shared"},
  experts=_sigmoid(
    experts=("n_routed_experts", None),
    shared=("n_shared_experts", None),
    chosen=None,
    normalize=False,
  ),
  dense_layers=_first_dense(0),
)
ERNIE4_5_MOE = table.make(
  "ernie4_5_moe",
  "Ernie4_5_MoeForCausalLM",
  aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
  neutral={"use_bias": (False,)},
  max_length=131_072,
  epsilon=1e-5,
  kv_heads=4,
  rope={"interleaved": True, "theta": 500_000.0},
  experts=table.Field(_read_ernie_experts),
  dense_layers=table.Field(_read_ernie_dense),
  tied=table.flag("tie_word_embeddings", True),
  tensors={"mlp.gate.e_score": "mlp.moe_statics.e_score"},
)
EXAONE_MOE = table.make(
  "exaone_moe",
  "ExaoneMoeForCausalLM",
  other_architectures=("ExaoneMoEForCausalLM",),
  inert=("output_router_logits",),
  max_length=2048,
  epsilon=1e-5,
  kv_heads=32,
  windows=dense_decoders.EXAONE_WINDOWS,
  unrotated=dense_decoders.EXAONE_UNROTATED,
  attention={"head_norm": "shared"},
  experts=_sigmoid(
    experts=("num_experts", 64),
    shared=("num_shared_experts", 1),
    mlp_dim=1024,
    scale=2.5,
  ),
  dense_layers=table.Field(_read_exaone_dense),
  tensors={"mlp.gate.e_score": "mlp.e_score"},
)
FLEX_OLMO = table.make(
  "flex_olmo",
  "FlexOlmoForCausalLM",
  max_length=4096,
  form=block_layers.POST_NORM,
  rope={"theta": 500_000.0},
  attention={**table.BIASES, "head_norm": "width"},
  experts=_softmax(
    experts=("num_experts", 7),
    chosen=5,
    mlp=("intermediate_size", 11_008),
    normalize=table.flag("norm_topk_prob", False),
  ),
)
GLM4_MOE = table.make(
  "glm4_moe",
  "Glm4MoeForCausalLM",
  aliases={
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
  },
  inert=("output_router_logits",),
  further_layers="num_nextn_predict_layers",
  max_length=131_072,
  epsilon=1e-5,
  kv_heads=8,
  rope={"partial": 0.5},
  attention={
    "qkv_bias": table.ATTENTION_BIAS,
    "head_norm": table.map_value(
      "use_qk_norm", False, {False: "", True: "shared"}
    ),
  },
  experts=_sigmoid(),
  dense_layers=_first_dense(1),
  num_nextn_predict_layers=table.count("num_nextn_predict_layers", 1),
)
GLM4_MOE_LITE = table.make(
  "glm4_moe_lite",
  "Glm4MoeLiteForCausalLM",
  aliases={"num_local_experts": "n_routed_experts"},
  **_latent(202_752, query_latent_dim=768, plain_dim=192, value_dim=256),
  epsilon=1e-5,
  experts=_sigmoid(
    experts=("n_routed_experts", 64), chosen=4, mlp_dim=1536, scale=1.8
  ),
  dense_layers=table.Field(_read_lite_dense),
)
HUNYUAN_MOE = table.make(
  "hunyuan_v1_moe",
  "HunYuanMoEV1ForCausalLM",
  aliases={
    "num_experts_per_tok": "moe_topk",
    "num_local_experts": "num_experts",
  },
  # Widths and numbers that the class of transformers does not read.
  inert=(
    "eod_token_id",
    "moe_intermediate_size",
    "num_shared_expert",
    "output_router_logits",
  ),
  max_length=2048,
  epsilon=1e-5,
  rope=dense_decoders.HUNYUAN_ROPE,
  attention={**table.BIASES, "head_norm": "shared", "norm_after_rotary": True},
  experts=table.Field(_read_hunyuan_experts),
  tensors={
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    "mlp.gate.": "mlp.gate.wg.",
  },
)
KIMI_K2 = dataclasses.replace(deepseek.DEEPSEEK_V3, model_type="kimi_k2")
MINIMAX_M2 = table.make(
  "minimax_m2",
  "MiniMaxM2ForCausalLM",
  inert=("router_jitter_noise",),
  max_length=196_608,
  kv_heads=8,
  head_dim=128,
  # Published files have the number of rotated features.
  rope={
    "partial": table.Field(
      lambda fields: (
        fields.size("rotary_dim", fields.size("head_dim", 128))
        / fields.size("head_dim", 128)
      )
    ),
    "theta": 5_000_000.0,
  },
  attention={"head_norm": "width"},
  experts=_softmax(
    experts=("num_local_experts", 256),
    chosen=8,
    mlp=("intermediate_size", 1536),
    normalize=True,
    is_sigmoid=True,
    has_selection_bias=True,
    at="block_sparse_moe",
    tensors=("w1", "w3", "w2"),
  ),
  tensors={"gate.e_score": "e_score"},
)
SOLAR_OPEN = table.make(
  "solar_open",
  "SolarOpenForCausalLM",
  aliases={"num_local_experts": "n_routed_experts"},
  inert=("output_router_logits",),
  max_length=131_072,
  epsilon=1e-5,
  kv_heads=8,
  head_dim=128,
  rope={"theta": 1_000_000.0, "partial": 1.0},
  attention={"qkv_bias": table.ATTENTION_BIAS},
  mlp={"mlp_dim": table.size("moe_intermediate_size", 1280)},
  experts=_sigmoid(mlp_dim=1280),
)
YOUTU = table.make(
  "youtu",
  "YoutuForCausalLM",
  **_latent(131_072),
  tied=table.flag("tie_word_embeddings", True),
)
