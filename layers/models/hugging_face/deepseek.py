"""DeepSeek-V2 and V3: latent attention, and mixtures of fine-grained experts.

- DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434)
- DeepSeek-V3 and R1 (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437), and
  models of the same class, such as Moonlight. Modules that predict further
  tokens (`num_nextn_predict_layers`) count in training only; weights in fp8 are
  read as bfloat16.
"""

from typing import Any

from paxon.layers.models.hugging_face import (
  block_layers,
  decoder,
  expert_layers,
  family,
  latent_layers,
  rope,
)

_INERT = ("output_router_logits", "ep_size")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "attention_bias": (False,),
  "mlp_bias": (False,),
  "moe_layer_freq": (1,),
}


def _read(
  fields: family.Fields, *, num_dense: int, shared: int, **router: Any
) -> decoder.Decoder:
  """Reads the fields that both have."""
  attention = latent_layers.read(fields)
  num_heads = attention.num_heads
  if fields.get("num_key_value_heads", None) not in (None, num_heads):
    fields.reject("num_key_value_heads", f"num_attention_heads ({num_heads})")
  derived = {
    "head_dim": attention.rope_dim,
    "qk_head_dim": attention.plain_dim + attention.rope_dim,
  }
  for name, value in derived.items():
    if fields.get(name, None) not in (None, value):
      fields.reject(name, f"{value}, by the widths of the parts of a head")
  num_layers = fields.size("num_hidden_layers")
  mlp_dim = fields.size("moe_intermediate_size")
  num_shared = fields.optional_size("n_shared_experts", shared)
  return decoder.Decoder(
    vocabulary=decoder.Vocabulary(
      size=fields.size("vocab_size"),
      tied=fields.flag("tie_word_embeddings", False),
    ),
    embed_dim=fields.size("hidden_size"),
    feed_forward=block_layers.FeedForward(
      mlp_dim=fields.size("intermediate_size"),
      activation=fields.activation("hidden_act", "silu"),
    ),
    attention=attention,
    windows=(None,) * num_layers,
    rope=rope.read(
      fields,
      head_dim=attention.rope_dim,
      max_length=fields.size("max_position_embeddings"),
      interleaved=fields.flag("rope_interleave", True, null=False),
    ),
    norm=block_layers.Norm(epsilon=fields.number("rms_norm_eps", 1e-6)),
    experts=expert_layers.Experts(
      **_read_choice(fields),
      **router,
      mlp_dim=mlp_dim,
      shared_dim=None if num_shared is None else num_shared * mlp_dim,
      has_shared_gate=False,
      shared_at="mlp.shared_experts",
    ),
    dense_layers=tuple(
      range(min(fields.count("first_k_dense_replace", num_dense), num_layers))
    ),
    num_nextn_predict_layers=fields.count("num_nextn_predict_layers", 0),
  )


def _read_choice(fields: family.Fields) -> dict[str, Any]:
  """Returns numbers of experts and the auxiliary loss."""
  total = fields.size("n_routed_experts")
  chosen = fields.size("num_experts_per_tok")
  if chosen > total:
    fields.reject(
      "num_experts_per_tok", f"at most the number of experts ({total})"
    )
  weight = fields.value("aux_loss_alpha", 0)
  if weight != 0 or isinstance(weight, bool):
    weight = fields.number("aux_loss_alpha")
  return {
    "num_experts": total,
    "num_chosen": chosen,
    "balance_weight": float(weight),
    "balance": "sequence" if fields.flag("seq_aux", True) else "batch",
  }


def read_groups(
  fields: family.Fields,
  *,
  num_summed: int,
  defaults: tuple[int, int],
  experts: tuple[str, int | None] = ("n_routed_experts", None),
  num_chosen: int | None = None,
) -> dict[str, int]:
  """Returns the fields of `routers.ExpertGroups`.

  Raises:
    UnsupportedConfigError: Groups do not divide the experts, or are too small.
  """
  total = fields.size(*experts)
  groups = fields.size("n_group", defaults[0])
  chosen = fields.size("topk_group", defaults[1])
  if total % groups or total // groups < num_summed:
    fields.reject(
      "n_group",
      f"groups of equal size, at least {num_summed}, of the {total} experts",
    )
  if chosen > groups:
    fields.reject("topk_group", f"at most n_group ({groups})")
  choices = total // groups * chosen
  if fields.size("num_experts_per_tok", num_chosen) > choices:
    fields.reject(
      "num_experts_per_tok",
      f"at most the {choices} experts of topk_group ({chosen}) groups",
    )
  return {
    "num_groups": groups,
    "num_chosen": chosen,
    "num_summed": num_summed,
  }


def _read_v2(fields: family.Fields) -> decoder.Decoder:
  limited = {"greedy": False, "group_limited_greedy": True}
  groups = None
  if fields.map_value("topk_method", "greedy", limited):
    groups = read_groups(fields, num_summed=1, defaults=(0, 0))
  else:
    # Without effect.
    fields.get("n_group", None), fields.get("topk_group", None)
  return _read(
    fields,
    num_dense=0,
    shared=2,
    normalize=False,
    scale=fields.number("routed_scaling_factor", 1.0),
    groups=groups,
  )


def _read_v3(fields: family.Fields) -> decoder.Decoder:
  return _read(
    fields,
    num_dense=3,
    shared=1,
    normalize=fields.flag("norm_topk_prob", True, null=False),
    epsilon=1e-20,
    scale=fields.number("routed_scaling_factor", 2.5),
    groups=read_groups(fields, num_summed=2, defaults=(8, 4)),
    is_sigmoid=True,
    has_selection_bias=True,
  )


DEEPSEEK_V2 = family.Family(
  model_type="deepseek_v2",
  architecture="DeepseekV2ForCausalLM",
  read=_read_v2,
  aliases={"num_experts": "n_routed_experts"},
  inert=_INERT,
  neutral={
    **_NEUTRAL,
    "scoring_func": ("softmax",),
    # transformers ignores it; published models do not normalize.
    "norm_topk_prob": (False,),
    "rope_interleave": (True,),
  },
)
DEEPSEEK_V3 = family.Family(
  model_type="deepseek_v3",
  architecture="DeepseekV3ForCausalLM",
  read=_read_v3,
  aliases={
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
  },
  inert=_INERT,
  neutral={
    **_NEUTRAL,
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
  },
  further_layers="num_nextn_predict_layers",
)
