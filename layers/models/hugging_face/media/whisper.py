"""Whisper, which transcribes and translates speech.

Radford et al. 2022, https://arxiv.org/abs/2212.04356. The model is an
`encoder_decoder.EncoderDecoder` whose `encoder_inputs` are log-mel features
[B,2S,K] of `layers.speech.whisper_features`; positions and segment ids of the
encoder are [B,S]. The encoder's sinusoids are a tensor in the files, and a
table here; transformers does not train it (`--fdl.frozen`).
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp

from paxon.layers import activations, embedding, feed_forward, unembedding
from paxon.layers.attention import (
  cross_attention,
  grouped_query,
  projections,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models import encoder_decoder
from paxon.layers.models.hugging_face import (
  family,
  mapping,
)
from paxon.layers.models.hugging_face.media import towers
from paxon.layers.norms import layer_norm
from paxon.layers.positions import position_embedding
from paxon.layers.speech import audio_encoder
from paxon.layers.stacks import block, encoder_decoder_block, stack
from paxon.layers.vision import convolutions
from paxon.sharding import axes

_EPSILON = 1e-5
_WIDTH, _STRIDE = 3, 2
# After letters of sizes of the decoder.
_DECODER = "d"
# Letters: D embed, C mel bins, I channels, R width of a kernel, S positions of
# the encoder, T of the decoder, V vocab; of a side F mlp, N heads, H head_dim.
_MODEL = """
  encoder.conv1  encoder_embedding/layers_0/conv/kernel  D C R -> R C D + bias
  encoder.conv2  encoder_embedding/layers_1/conv/kernel  D I R -> R I D + bias
  encoder.embed_positions.weight  encoder_position_embedding/table  S D -> S D
  encoder.layer_norm  encoder_norm  norm
  decoder.embed_tokens.weight  embedding/table  V D -> V D
  decoder.embed_positions.weight  decoder_position_embedding/table  T D -> T D
  decoder.layer_norm  decoder_norm  norm
"""
_HEAD = """
  proj_out.weight  params/head/kernel  V D -> D V
"""
_ATTENTION = """
  q_proj         query  (N H) D -> D N H + bias
  k_proj.weight  key    (N H) D -> D N H
  v_proj         value  (N H) D -> D N H + bias
  out_proj       out    D (N H) -> N H D + bias
"""
_FEED_FORWARD = """
  final_layer_norm  feed_forward_norm  norm
  fc1               feed_forward/up    F D -> D F + bias
  fc2               feed_forward/down  D F -> F D + bias
"""
# Fields of training, of generation, and of other classes.
_INERT = """
  activation_dropout apply_spec_augment classifier_proj_size decoder_layerdrop
  dropout encoder_layerdrop init_std mask_feature_length mask_feature_min_masks
  mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob
  median_filter_width use_weighted_layer_sum
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Side:
  """Hyperparameters of the encoder or the decoder."""

  num_layers: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  length: int
  activation: activations.Activation

  def attention(
    self, make: Callable[..., Any], cls: Callable[..., Any], **fields: Any
  ) -> Any:
    """Returns an attention layer of a class."""
    return make(
      cls,
      num_heads=self.num_heads,
      num_kv_heads=self.num_heads,
      head_dim=self.head_dim,
      projections=make(projections.UnbiasedKeys),
      **fields,
    )

  def self_attention(self, make: Callable[..., Any], *, causal: bool) -> Any:
    """Returns a self-attention layer."""
    mask = make(attention_mask.MaskRules, causal=causal)
    return self.attention(make, grouped_query.GroupedQueryAttention, mask=mask)

  def feed_forward(self, make: Callable[..., Any]) -> Any:
    """Returns a feed-forward layer."""
    return make(
      feed_forward.FeedForward,
      mlp_dim=self.mlp_dim,
      activation=self.activation,
    )

  def positions(self, make: Callable[..., Any]) -> Any:
    """Returns a table of positions."""
    return make(position_embedding.LearnedPositions, max_length=self.length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Whisper:
  """Hyperparameters of a Whisper."""

  vocab_size: int
  embed_dim: int
  num_bins: int
  encoder: _Side
  decoder: _Side
  tied: bool

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""
    head = None
    if not self.tied:
      head = make(unembedding.Unembedding, vocab_size=self.vocab_size)
    encoder_block = make(
      block.TransformerBlock,
      attention_norm=_norm(make),
      attention=self.encoder.self_attention(make, causal=False),
      feed_forward_norm=_norm(make),
      feed_forward=self.encoder.feed_forward(make),
    )
    decoder_block = make(
      encoder_decoder_block.CrossBlock,
      self_attention_norm=_norm(make),
      self_attention=self.decoder.self_attention(make, causal=True),
      cross_attention_norm=_norm(make),
      cross_attention=self.decoder.attention(
        make, cross_attention.CrossAttention
      ),
      feed_forward_norm=_norm(make),
      feed_forward=self.decoder.feed_forward(make),
    )
    return make(
      encoder_decoder.EncoderDecoder,
      embedding=make(
        embedding.Embedding,
        vocab_size=self.vocab_size,
        embed_dim=self.embed_dim,
      ),
      encoder=make(
        stack.Stack, blocks=[encoder_block], num_layers=self.encoder.num_layers
      ),
      encoder_norm=_norm(make),
      decoder=make(
        stack.Stack, blocks=[decoder_block], num_layers=self.decoder.num_layers
      ),
      decoder_norm=_norm(make),
      head=head,
      encoder_embedding=self._convolutions(make),
      encoder_position_embedding=self.encoder.positions(make),
      decoder_position_embedding=self.decoder.positions(make),
    )

  def _convolutions(self, make: Callable[..., Any]) -> Any:
    layers = [
      make(
        convolutions.ConvNormAct,
        conv=make(
          convolutions.Conv,
          output_dim=self.embed_dim,
          kernel_size=(_WIDTH,),
          strides=stride,
          padding=convolutions.Padding.CENTERED,
          kernel_axes=(None, axes.EMBED),
        ),
        # Whatever that of the layers is.
        activation=family.ACTIVATIONS["gelu"],
      )
      for stride in (1, _STRIDE)
    ]
    return make(audio_encoder.ConvEmbedding, layers=layers)

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    rules = mapping.parse_rules(_MODEL, at="model.", to="params/")
    if not self.tied:
      rules += mapping.parse_rules(_HEAD)
    return mapping.Names(
      sizes={
        "V": self.vocab_size,
        "D": self.embed_dim,
        "I": self.embed_dim,
        "C": self.num_bins,
        "R": _WIDTH,
        "S": self.encoder.length,
        "T": self.decoder.length,
        "Dd": self.embed_dim,
        **_side_sizes(self.encoder, ""),
        **_side_sizes(self.decoder, _DECODER),
      },
      rules=rules,
      stacks=(
        mapping.StackRules(
          stack="params/encoder",
          num_layers=self.encoder.num_layers,
          rules=_layer_rules("encoder", {"self_attn": "attention"}),
        ),
        mapping.StackRules(
          stack="params/decoder",
          num_layers=self.decoder.num_layers,
          rules=towers.mark_sizes(
            _layer_rules(
              "decoder",
              {
                "self_attn": "self_attention",
                "encoder_attn": "cross_attention",
              },
            ),
            _DECODER,
          ),
        ),
      ),
      tied={"proj_out.weight": "model.decoder.embed_tokens.weight"}
      if self.tied
      else {},
    )


def _norm(make: Callable[..., Any]) -> Any:
  return make(layer_norm.LayerNorm, epsilon=_EPSILON)


def _layer_rules(
  side: str, attention: Mapping[str, str]
) -> tuple[mapping.Rule, ...]:
  """Returns the rules of a layer; `attention` are leaves by tensor."""
  at = f"model.{side}.layers.{{}}."
  rules = mapping.parse_rules(_FEED_FORWARD, at=at)
  for tensor, leaf in attention.items():
    norm = f"{tensor}_layer_norm {leaf}_norm norm"
    rules += mapping.parse_rules(norm, at=at)
    rules += mapping.parse_rules(_ATTENTION, at=f"{at}{tensor}.", to=f"{leaf}/")
  return rules


def _side_sizes(side: _Side, mark: str) -> dict[str, int]:
  sizes = {"F": side.mlp_dim, "N": side.num_heads, "H": side.head_dim}
  return {f"{letter}{mark}": size for letter, size in sizes.items()}


def _read(fields: family.Fields) -> _Whisper:
  fields.map_value("is_encoder_decoder", True, {True: True})
  embed_dim = fields.size("d_model", 384)
  if embed_dim % 2:
    fields.reject("d_model", "an even number")
  activation = fields.activation("activation_function", "gelu")
  lengths = {
    "encoder": fields.size("max_source_positions", 1500),
    "decoder": fields.size("max_target_positions", 448),
  }
  sides = {}
  for side, length in lengths.items():
    num_heads = fields.size(f"{side}_attention_heads", 6)
    if embed_dim % num_heads:
      fields.reject(
        f"{side}_attention_heads", f"a divisor of d_model ({embed_dim})"
      )
    sides[side] = _Side(
      num_layers=fields.size(f"{side}_layers", 4),
      num_heads=num_heads,
      head_dim=embed_dim // num_heads,
      mlp_dim=fields.size(f"{side}_ffn_dim", 1536),
      length=length,
      activation=activation,
    )
  return _Whisper(
    vocab_size=fields.size("vocab_size", 51865),
    embed_dim=embed_dim,
    num_bins=fields.size("num_mel_bins", 80),
    tied=fields.flag("tie_word_embeddings", True),
    **sides,
  )


def _make_example(config: Mapping[str, Any]) -> tuple[Any, ...]:
  """Returns tokens, and the features of a whole window."""
  ids = jnp.zeros((1, 2), jnp.int32)
  length = config.get("max_source_positions", 1500)
  shape = 1, _STRIDE * length, config.get("num_mel_bins", 80)
  places = jnp.zeros((1, length), jnp.int32)
  return ids, ids, ids, jnp.zeros(shape), places, places + 1


FAMILY = family.Family(
  model_type="whisper",
  architecture="WhisperForConditionalGeneration",
  read=_read,
  aliases={
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
    "num_key_value_heads": "encoder_attention_heads",
  },
  inert=tuple(_INERT.split()),
  # Not used by transformers, and set by no file.
  neutral={"scale_embedding": (False,)},
  example=_make_example,
)
