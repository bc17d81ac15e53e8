"""T5 v1.0 and v1.1, and models of the same architecture, such as Flan-T5.

Raffel et al. 2019, https://arxiv.org/abs/1910.10683. Version 1.0 has plain
feed-forward layers and a tied head with the scale `d_model ** -0.5`; version
1.1 has gated ones and an untied head. All layers of the encoder share one table
of relative positions, those of the decoder another; cross-attention has none.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxon.layers import activations, embedding, feed_forward, unembedding
from paxon.layers.attention import (
  cross_attention,
  grouped_query,
  kernels,
  position_bias,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models import encoder_decoder
from paxon.layers.models.hugging_face import family, mapping
from paxon.layers.norms import rms_norm
from paxon.layers.stacks import block, encoder_decoder_block, shared, stack

_TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_MODEL = f"""
  shared.weight                    params/embedding/table     V D -> V D
  encoder.{_TABLE}                 shared/encoder_bias/table  R N -> R N
  encoder.final_layer_norm.weight  params/encoder_norm/scale  D -> D
  decoder.{_TABLE}                 shared/decoder_bias/table  R N -> R N
  decoder.final_layer_norm.weight  params/decoder_norm/scale  D -> D
"""


def _make_example(config: Mapping[str, Any]) -> tuple[jax.Array, ...]:
  """Returns ids, positions and segment ids of the decoder and the encoder."""
  del config
  return (jnp.zeros((1, 2), jnp.int32),) * 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class _T5:
  """Hyperparameters of a T5; `sizes` are those of `mapping.Names`."""

  sizes: Mapping[str, int]
  num_encoder: int
  num_decoder: int
  max_distance: int
  epsilon: float
  activation: activations.Activation
  is_gated: bool
  tied: bool

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""
    head = None
    if not self.tied:
      head = make(unembedding.Unembedding, vocab_size=self.sizes["V"])
    return make(
      encoder_decoder.EncoderDecoder,
      embedding=make(
        embedding.Embedding,
        vocab_size=self.sizes["V"],
        embed_dim=self.sizes["D"],
        attend_scale=self.sizes["D"] ** -0.5 if self.tied else 1.0,
      ),
      encoder=make(
        stack.Stack,
        blocks=[_encoder_block(self, make)],
        num_layers=self.num_encoder,
      ),
      encoder_norm=_norm(self, make),
      decoder=make(
        stack.Stack,
        blocks=[_decoder_block(self, make)],
        num_layers=self.num_decoder,
      ),
      decoder_norm=_norm(self, make),
      head=head,
    )

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    if self.tied:
      copies.append("lm_head.weight")
    table = _MODEL + ("" if self.tied else family.HEAD)
    return mapping.Names(
      sizes=self.sizes,
      rules=mapping.parse_rules(table),
      stacks=(
        mapping.StackRules(
          stack="params/encoder",
          num_layers=self.num_encoder,
          rules=(
            *_attention_rules("encoder", 0, "SelfAttention", "attention"),
            *_feed_forward_rules("encoder", 1, self.is_gated),
          ),
        ),
        mapping.StackRules(
          stack="params/decoder",
          num_layers=self.num_decoder,
          rules=(
            *_attention_rules("decoder", 0, "SelfAttention", "self_attention"),
            *_attention_rules(
              "decoder", 1, "EncDecAttention", "cross_attention"
            ),
            *_feed_forward_rules("decoder", 2, self.is_gated),
          ),
        ),
      ),
      tied=dict.fromkeys(copies, "shared.weight"),
      # Version 1.1 with a tied head, which transformers ties by default.
      copied={} if self.tied else {"lm_head.weight": "shared.weight"},
      # Stored by the first version and never used.
      ignored=(
        r"decoder\.block\.0\.layer\.1\.EncDecAttention"
        r"\.relative_attention_bias\.weight",
      ),
    )


def _read(fields: family.Fields) -> _T5:
  fields.map_value("is_encoder_decoder", True, {True: True})
  fields.map_value("is_decoder", False, {False: False})
  buckets = fields.size("relative_attention_num_buckets", 32)
  if buckets % 4:
    fields.reject("relative_attention_num_buckets", "a multiple of 4")
  distance = fields.size("relative_attention_max_distance", 128)
  if distance <= buckets // 2:
    fields.reject(
      "relative_attention_max_distance",
      f"more than half of relative_attention_num_buckets ({buckets})",
    )
  is_gated, activation = _read_activation(fields)
  num_layers = fields.size("num_layers")
  return _T5(
    sizes={
      "V": fields.size("vocab_size"),
      "D": fields.size("d_model"),
      "F": fields.size("d_ff"),
      "N": fields.size("num_heads"),
      "H": fields.size("d_kv"),
      "R": buckets,
    },
    num_encoder=num_layers,
    num_decoder=fields.optional_size("num_decoder_layers") or num_layers,
    max_distance=distance,
    epsilon=fields.number("layer_norm_epsilon", 1e-6),
    activation=activation,
    is_gated=is_gated,
    tied=_read_tied(fields),
  )


def _read_activation(
  fields: family.Fields,
) -> tuple[bool, activations.Activation]:
  """Returns whether feed-forward layers are gated, and the activation."""
  name = "feed_forward_proj"
  supported: dict[Any, tuple[bool, str]] = {}
  for each in family.ACTIVATIONS:
    supported |= {each: (False, each), f"gated-{each}": (True, each)}
  # Files of version 1.1 mean the tanh approximation.
  supported["gated-gelu"] = True, "gelu_new"
  is_gated, activation = fields.map_value(name, "relu", supported)
  if fields.value("is_gated_act", is_gated) != is_gated:
    fields.reject("is_gated_act", f"{is_gated}, as in {name}")
  if fields.value("dense_act_fn", activation) != activation:
    fields.reject("dense_act_fn", f"{activation!r}, as in {name}")
  return is_gated, family.ACTIVATIONS[activation]


def _read_tied(fields: family.Fields) -> bool:
  # Files of transformers 5 tie all heads and have another field for the scale.
  tied = fields.flag("tie_word_embeddings", True)
  return fields.flag("scale_decoder_outputs", tied)


def _norm(t5: _T5, make: Callable[..., Any]) -> Any:
  return make(rms_norm.RmsNorm, epsilon=t5.epsilon)


def _encoder_block(t5: _T5, make: Callable[..., Any]) -> Any:
  return make(
    block.TransformerBlock,
    attention_norm=_norm(t5, make),
    attention=_self_attention(t5, make, is_encoder=True),
    feed_forward_norm=_norm(t5, make),
    feed_forward=_feed_forward(t5, make),
  )


def _decoder_block(t5: _T5, make: Callable[..., Any]) -> Any:
  return make(
    encoder_decoder_block.CrossBlock,
    self_attention_norm=_norm(t5, make),
    self_attention=_self_attention(t5, make, is_encoder=False),
    cross_attention_norm=_norm(t5, make),
    cross_attention=make(
      cross_attention.CrossAttention,
      num_heads=t5.sizes["N"],
      num_kv_heads=t5.sizes["N"],
      head_dim=t5.sizes["H"],
      logits=make(kernels.Logits, scale=1.0),
    ),
    feed_forward_norm=_norm(t5, make),
    feed_forward=_feed_forward(t5, make),
  )


def _self_attention(
  t5: _T5, make: Callable[..., Any], *, is_encoder: bool
) -> Any:
  bias = make(
    position_bias.RelativeBias,
    num_buckets=t5.sizes["R"],
    max_distance=t5.max_distance,
    bidirectional=is_encoder,
  )
  label = f"{'encoder' if is_encoder else 'decoder'}_bias"
  return make(
    grouped_query.GroupedQueryAttention,
    num_heads=t5.sizes["N"],
    num_kv_heads=t5.sizes["N"],
    head_dim=t5.sizes["H"],
    mask=make(attention_mask.MaskRules, causal=not is_encoder),
    logits=make(
      kernels.Logits,
      scale=1.0,
      position_bias=make(shared.Shared, label=label, part=bias),
    ),
  )


def _feed_forward(t5: _T5, make: Callable[..., Any]) -> Any:
  sizes = {"mlp_dim": t5.sizes["F"], "activation": t5.activation}
  if t5.is_gated:
    return make(feed_forward.GatedFeedForward, **sizes)
  return make(feed_forward.FeedForward, use_bias=False, **sizes)


def _attention_rules(
  side: str, place: int, tensor: str, leaf: str
) -> tuple[mapping.Rule, ...]:
  table = f"""
    layer_norm.weight  {leaf}_norm/scale  D -> D
    {tensor}.q.weight  {leaf}/query       (N H) D -> D N H
    {tensor}.k.weight  {leaf}/key         (N H) D -> D N H
    {tensor}.v.weight  {leaf}/value       (N H) D -> D N H
    {tensor}.o.weight  {leaf}/out         D (N H) -> N H D
  """
  return mapping.parse_rules(table, at=f"{side}.block.{{}}.layer.{place}.")


_PLAIN = """
  DenseReluDense.wi.weight    feed_forward/up    F D -> D F
"""
_GATED = """
  DenseReluDense.wi_0.weight  feed_forward/gate  F D -> D F
  DenseReluDense.wi_1.weight  feed_forward/up    F D -> D F
"""
_FEED_FORWARD = """
  layer_norm.weight           feed_forward_norm/scale  D -> D
  DenseReluDense.wo.weight    feed_forward/down  D F -> F D
"""


def _feed_forward_rules(
  side: str, place: int, is_gated: bool
) -> tuple[mapping.Rule, ...]:
  table = _FEED_FORWARD + (_GATED if is_gated else _PLAIN)
  return mapping.parse_rules(table, at=f"{side}.block.{{}}.layer.{place}.")


FAMILY = family.Family(
  model_type="t5",
  architecture="T5ForConditionalGeneration",
  read=_read,
  aliases={
    "head_dim": "d_kv",
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
  },
  # Of training, and former names.
  inert=("dropout_rate", "n_positions", "output_past"),
  example=_make_example,
)
