"""GPT-2 (Radford et al. 2019).

Layer norms and learned positions, biases everywhere, one kernel for queries,
keys and values, a plain feed-forward layer, and a tied head. Unlike elsewhere,
kernels have inputs first.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from paxon.layers import (
  activations,
  block,
  embedding,
  feed_forward,
  layer_norm,
  position_embedding,
  stack,
  unembedding,
)
from paxon.layers.attention import (
  grouped_query,
  kernels,
  projections,
)
from paxon.layers.models import decoder_lm
from paxon.layers.models.hugging_face import (
  family,
  mapping,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gpt2:
  """Hyperparameters of a GPT-2."""

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
    """Returns the model, built by `make(cls, **fields)`."""

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
          projections=make(projections.CombinedProjections, use_bias=True),
          logits=make(kernels.Logits, scale=scale),
        ),
        feed_forward_norm=norm(),
        feed_forward=make(
          feed_forward.FeedForward,
          mlp_dim=self.mlp_dim,
          activation=self.activation,
        ),
      )
      for scale in mapping.find_period(self.logit_scales)
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

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    head = mapping.rule("lm_head.weight", "params/head/kernel", "V D -> D V")
    return mapping.Names(
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
        mapping.rule(
          "transformer.wte.weight", "params/embedding/table", "V D -> V D"
        ),
        mapping.rule(
          "transformer.wpe.weight",
          "params/position_embedding/table",
          "P D -> P D",
        ),
        *mapping.norm_rules("transformer.ln_f", "params/final_norm"),
        *(() if self.tied else (head,)),
      ),
      stacks=(
        mapping.StackRules(
          stack="params/stack",
          num_layers=self.num_layers,
          period=len(mapping.find_period(self.logit_scales)),
          rules=_layer_rules("transformer.h.{}."),
        ),
      ),
      tied={"lm_head.weight": "transformer.wte.weight"} if self.tied else {},
      # Masks in old files.
      ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
      prefix="transformer.",
    )


def _read(fields: family.Fields) -> _Gpt2:
  embed_dim = fields.size("n_embd", 768)
  num_heads = fields.size("n_head", 12)
  num_layers = fields.size("n_layer", 12)
  if embed_dim % num_heads:
    fields.reject("n_head", f"a divisor of n_embd ({embed_dim})")
  is_scaled = fields.flag("scale_attn_weights", True)
  scale = None if is_scaled else 1.0
  scales = (scale,) * num_layers
  if fields.flag("scale_attn_by_inverse_layer_idx", False):
    first = (embed_dim // num_heads) ** -0.5 if is_scaled else 1.0
    scales = tuple(first / (layer + 1) for layer in range(num_layers))
  return _Gpt2(
    vocab_size=fields.size("vocab_size", 50_257),
    embed_dim=embed_dim,
    mlp_dim=fields.optional_size("n_inner") or 4 * embed_dim,
    num_heads=num_heads,
    num_layers=num_layers,
    max_length=fields.size("n_positions", 1024),
    activation=fields.activation("activation_function", "gelu_new"),
    epsilon=fields.number("layer_norm_epsilon", 1e-5),
    tied=fields.flag("tie_word_embeddings", True),
    logit_scales=scales,
  )


def _layer_rules(at: str) -> tuple[mapping.Rule, ...]:
  attention, mlp = f"{at}attn", f"{at}mlp"
  return (
    *mapping.norm_rules(f"{at}ln_1", "attention_norm"),
    mapping.rule(
      f"{attention}.c_attn.weight", "attention/qkv", "D (C N H) -> D C N H"
    ),
    mapping.rule(
      f"{attention}.c_attn.bias", "attention/qkv_bias", "(C N H) -> C N H"
    ),
    mapping.rule(
      f"{attention}.c_proj.weight", "attention/out", "(N H) D -> N H D"
    ),
    mapping.rule(f"{attention}.c_proj.bias", "attention/out_bias", "D -> D"),
    *mapping.norm_rules(f"{at}ln_2", "feed_forward_norm"),
    mapping.rule(f"{mlp}.c_fc.weight", "feed_forward/up", "D F -> D F"),
    mapping.rule(f"{mlp}.c_fc.bias", "feed_forward/up_bias", "F -> F"),
    mapping.rule(f"{mlp}.c_proj.weight", "feed_forward/down", "F D -> F D"),
    mapping.rule(f"{mlp}.c_proj.bias", "feed_forward/down_bias", "D -> D"),
  )


FAMILY = family.Family(
  model_type="gpt2",
  architecture="GPT2LMHeadModel",
  read=_read,
  # Number of positions under another name, and an order of operations that only
  # changes rounding.
  inert=("n_ctx", "reorder_and_upcast_attn"),
)
