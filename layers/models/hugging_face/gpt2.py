"""GPT-2 (Radford et al. 2019).

Layer norms and learned positions, biases everywhere, one kernel for queries,
keys and values, a plain feed-forward layer, and a tied head. Kernels of theirs
stand as ours do, inputs first.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from paxon.layers import (
  block,
  embedding,
  feed_forward,
  layer_norm,
  position_embedding,
  stack,
  unembedding,
)
from paxon.layers.attention import grouped_query, projections
from paxon.layers.models import decoder_lm
from paxon.layers.models.hugging_face import (
  activations,
  config_fields,
  family,
  patterns,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gpt2:
  """What a file says."""

  vocab_size: int
  embed_dim: int
  mlp_dim: int
  num_heads: int
  num_layers: int
  max_length: int
  activation: activations.Activation
  epsilon: float
  tied: bool
  logit_scales: tuple[float | None, ...]

  @property
  def head_dim(self) -> int:
    """Width of a head."""
    return self.embed_dim // self.num_heads

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, or what `make` makes of it."""

    def norm() -> Any:
      return make(layer_norm.LayerNorm, epsilon=self.epsilon)

    head = None
    if not self.tied:
      head = make(unembedding.Unembedding, vocab_size=self.vocab_size)
    blocks = [
      make(
        block.TransformerBlock,
        attention_norm=norm(),
        attention=make(
          grouped_query.GroupedQueryAttention,
          num_heads=self.num_heads,
          num_kv_heads=self.num_heads,
          head_dim=self.head_dim,
          projections=make(projections.CombinedProjections),
          use_bias=True,
          logit_scale=scale,
        ),
        feed_forward_norm=norm(),
        feed_forward=make(
          feed_forward.FeedForward,
          mlp_dim=self.mlp_dim,
          activation=self.activation,
        ),
      )
      for scale in patterns.one_period(self.logit_scales)
    ]
    return make(
      decoder_lm.DecoderLm,
      embedding=make(
        embedding.Embedding,
        vocab_size=self.vocab_size,
        embed_dim=self.embed_dim,
      ),
      stack=make(stack.Stack, blocks=blocks, num_layers=self.num_layers),
      final_norm=norm(),
      head=head,
      position_embedding=make(
        position_embedding.LearnedPositions, max_length=self.max_length
      ),
    )

  def names(self) -> family.Names:
    """Returns the names of the weights."""
    head = family.rule("lm_head.weight", "params/head/kernel", "V D -> D V")
    return family.Names(
      sizes={
        "V": self.vocab_size,
        "D": self.embed_dim,
        "F": self.mlp_dim,
        "N": self.num_heads,
        "H": self.head_dim,
        "P": self.max_length,
        "C": 3,
      },
      rules=(
        family.rule(
          "transformer.wte.weight", "params/embedding/table", "V D -> V D"
        ),
        family.rule(
          "transformer.wpe.weight",
          "params/position_embedding/table",
          "P D -> P D",
        ),
        *_norm("transformer.ln_f", "params/final_norm"),
        *(() if self.tied else (head,)),
      ),
      stacks=(
        family.StackRules(
          stack="params/stack",
          num_layers=self.num_layers,
          period=len(patterns.one_period(self.logit_scales)),
          rules=_layer("transformer.h.{}."),
        ),
      ),
      tied={"lm_head.weight": "transformer.wte.weight"} if self.tied else {},
      # Masks, which old files hold.
      ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
      prefix="transformer.",
    )


def _read(config: Mapping[str, Any]) -> _Gpt2:
  fields = config_fields.Fields(
    config,
    architecture=FAMILY.architecture,
    # The number of positions under another name, and an order of operations
    # that changes rounding only.
    inert=("n_ctx", "reorder_and_upcast_attn"),
  )
  embed_dim = fields.size("n_embd", 768)
  num_heads = fields.size("n_head", 12)
  num_layers = fields.size("n_layer", 12)
  if embed_dim % num_heads:
    fields.refuse("n_head", f"a divisor of n_embd ({embed_dim})")
  is_scaled = fields.flag("scale_attn_weights", True)
  scale = None if is_scaled else 1.0
  scales = (scale,) * num_layers
  if fields.flag("scale_attn_by_inverse_layer_idx", False):
    first = (embed_dim // num_heads) ** -0.5 if is_scaled else 1.0
    scales = tuple(first / (layer + 1) for layer in range(num_layers))
  result = _Gpt2(
    vocab_size=fields.size("vocab_size", 50_257),
    embed_dim=embed_dim,
    mlp_dim=fields.optional_size("n_inner") or 4 * embed_dim,
    num_heads=num_heads,
    num_layers=num_layers,
    max_length=fields.size("n_positions", 1024),
    activation=fields.one_of(
      "activation_function", "gelu_new", activations.SERVED
    ),
    epsilon=fields.number("layer_norm_epsilon", 1e-5),
    tied=fields.flag("tie_word_embeddings", True),
    logit_scales=scales,
  )
  fields.check_all_read()
  return result


def _norm(theirs: str, ours: str) -> tuple[family.Rule, ...]:
  return (
    family.rule(f"{theirs}.weight", f"{ours}/scale", "D -> D"),
    family.rule(f"{theirs}.bias", f"{ours}/bias", "D -> D"),
  )


def _layer(at: str) -> tuple[family.Rule, ...]:
  attention, mlp = f"{at}attn", f"{at}mlp"
  return (
    *_norm(f"{at}ln_1", "attention_norm"),
    family.rule(
      f"{attention}.c_attn.weight", "attention/qkv", "D (C N H) -> D C N H"
    ),
    family.rule(
      f"{attention}.c_attn.bias", "attention/qkv_bias", "(C N H) -> C N H"
    ),
    family.rule(
      f"{attention}.c_proj.weight", "attention/out", "(N H) D -> N H D"
    ),
    family.rule(f"{attention}.c_proj.bias", "attention/out_bias", "D -> D"),
    *_norm(f"{at}ln_2", "feed_forward_norm"),
    family.rule(f"{mlp}.c_fc.weight", "feed_forward/up", "D F -> D F"),
    family.rule(f"{mlp}.c_fc.bias", "feed_forward/up_bias", "F -> F"),
    family.rule(f"{mlp}.c_proj.weight", "feed_forward/down", "F D -> F D"),
    family.rule(f"{mlp}.c_proj.bias", "feed_forward/down_bias", "D -> D"),
  )


FAMILY = family.Family(
  model_type="gpt2",
  architecture="GPT2LMHeadModel",
  read=_read,
)
