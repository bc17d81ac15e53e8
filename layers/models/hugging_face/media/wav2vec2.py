"""wav2vec 2.0 with CTC (`Wav2Vec2ForCTC`).

Baevski et al. 2020, https://arxiv.org/abs/2006.11477. The model is a
`recognizer.Recognizer`; its blank is the padding id. Most models expect audio
with mean 0 and variance 1. The vector that replaces masked frames in training
(`masked_spec_embed`) is not read.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp

from paxon.layers import activations, linear
from paxon.layers.models import recognizer
from paxon.layers.models.hugging_face import (
  family,
  mapping,
)
from paxon.layers.models.hugging_face.media import towers
from paxon.layers.norms import group_norm, layer_norm
from paxon.layers.speech import wav2vec2
from paxon.layers.stacks import block
from paxon.layers.vision import convolutions
from paxon.sharding import axes

# Of norms between convolutions, whatever that of the others is.
_EPSILON = 1e-5
# Letters: D embed, F mlp, N heads, H head_dim, V vocab, K window of positions,
# P channels of a group, O and Q one; C0, ... channels, CC the last, W0, ...
# windows.
_MODEL = """
  feature_projection.layer_norm.weight  feature_norm/scale  CC -> CC
  feature_projection.layer_norm.bias    feature_norm/bias  CC -> CC
  feature_projection.projection         projection/kernel  D CC -> CC D + bias
  encoder.pos_conv_embed.conv.weight_v  POS/kernel  D P K -> K P D
  encoder.pos_conv_embed.conv.weight_g  POS/weight_norm/scale  O Q K -> K O Q
  encoder.pos_conv_embed.conv.bias      POS/bias  D -> D
"""
_HEAD = """
  lm_head  params/head/kernel  V D -> D V + bias
"""
_LAYER = """
  attention.q_proj                 attention/query    (N H) D -> D N H + bias
  attention.k_proj                 attention/key      (N H) D -> D N H + bias
  attention.v_proj                 attention/value    (N H) D -> D N H + bias
  attention.out_proj               attention/out      D (N H) -> N H D + bias
  layer_norm                       attention_norm     norm
  feed_forward.intermediate_dense  feed_forward/up    F D -> D F + bias
  feed_forward.output_dense        feed_forward/down  D F -> F D + bias
  final_layer_norm                 feed_forward_norm  norm
"""
_NEW_NORM = ".conv.parametrizations.weight.original"
# Fields of training, of pretraining, of other classes, and of adapters, which
# are rejected (`output_hidden_size`).
_INERT = """
  activation_dropout adapter_kernel_size adapter_stride apply_spec_augment
  classifier_proj_size codevector_dim contrastive_logits_temperature
  ctc_loss_reduction ctc_zero_infinity diversity_loss_weight
  feat_extract_dropout feat_proj_dropout feat_quantizer_dropout final_dropout
  layerdrop mask_feature_length mask_feature_min_masks mask_feature_prob
  mask_time_length mask_time_min_masks mask_time_prob num_adapter_layers
  num_codevector_groups num_codevectors_per_group num_negatives
  output_hidden_size proj_codevector_dim tdnn_dilation tdnn_dim tdnn_kernel
  use_weighted_layer_sum xvector_output_dim
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Conv:
  """Hyperparameters of a convolution of samples; `norm` is its class."""

  channels: int
  window: int
  stride: int
  norm: type | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wav2Vec2(towers.Tower):
  """Hyperparameters of a model; `sizes` are those of `mapping.Names`."""

  convolutions: tuple[_Conv, ...]
  conv_bias: bool
  num_groups: int
  conv_activation: activations.Activation
  blank_id: int

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""
    encoder = make(
      wav2vec2.Wav2Vec2Encoder,
      convolutions=[
        make(
          convolutions.Conv,
          output_dim=each.channels,
          kernel_size=(each.window,),
          strides=each.stride,
          padding=convolutions.Padding.VALID,
          use_bias=self.conv_bias,
          kernel_axes=(None, axes.EMBED),
        )
        for each in self.convolutions
      ],
      norms=[_conv_norm(each, make) for each in self.convolutions],
      activation=self.conv_activation,
      feature_norm=self.norm(make),
      projection=make(
        linear.Linear,
        output_dim=self.sizes["D"],
        kernel_axes=(None, axes.EMBED),
      ),
      position_embedding=make(
        wav2vec2.ConvPositions,
        conv=make(
          convolutions.Conv,
          output_dim=self.sizes["D"],
          kernel_size=(self.sizes["K"],),
          groups=self.num_groups,
          padding=convolutions.Padding.VALID,
          weight_norm=make(wav2vec2.PositionWeightNorm),
          kernel_axes=(None, axes.EMBED),
        ),
        activation=self.conv_activation,
      ),
      stack=self.stack(make),
      **{self._final_norm: self.norm(make)},
    )
    return make(
      recognizer.Recognizer,
      encoder=encoder,
      head=make(
        linear.Linear,
        output_dim=self.sizes["V"],
        kernel_axes=(axes.EMBED, None),
      ),
      blank_id=self.blank_id,
    )

  @property
  def _final_norm(self) -> str:
    """Name of the norm before or after the stack."""
    is_post_norm = self.block_class is block.PostNormBlock
    return "embedding_norm" if is_post_norm else "final_norm"

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    last = f"C{len(self.convolutions) - 1}"
    table = _MODEL.replace("POS/", "position_embedding/conv/")
    table += f"encoder.layer_norm {self._final_norm} norm\n"
    table = table.replace("CC", last)
    rules = mapping.parse_rules(table, at="wav2vec2.", to="params/encoder/")
    sizes = dict(self.sizes)
    channels = "A"
    for i, each in enumerate(self.convolutions):
      sizes |= {f"C{i}": each.channels, f"W{i}": each.window}
      table = f"conv.weight convolutions_{i}/kernel "
      table += f"C{i} {channels} W{i} -> W{i} {channels} C{i}\n"
      channels = f"C{i}"
      if self.conv_bias:
        table += f"conv.bias convolutions_{i}/bias C{i} -> C{i}\n"
      if each.norm is not None:
        for end, leaf in (("weight", "scale"), ("bias", "bias")):
          table += f"layer_norm.{end} norms_{i}/{leaf} C{i} -> C{i}\n"
      rules += mapping.parse_rules(
        table,
        at=f"wav2vec2.feature_extractor.conv_layers.{i}.",
        to="params/encoder/",
      )
    return mapping.Names(
      sizes=sizes,
      rules=(*rules, *mapping.parse_rules(_HEAD)),
      stacks=(
        mapping.StackRules(
          stack="params/encoder/stack",
          num_layers=self.num_layers,
          rules=mapping.parse_rules(_LAYER, at="wav2vec2.encoder.layers.{}."),
        ),
      ),
      kept=(r"wav2vec2\.masked_spec_embed",),
      # Of torch's newer weight norm.
      former={
        f"{_NEW_NORM}0": ".conv.weight_g",
        f"{_NEW_NORM}1": ".conv.weight_v",
      },
    )


def _conv_norm(conv: _Conv, make: Callable[..., Any]) -> Any:
  if conv.norm is None:
    return None
  groups = {}
  if conv.norm is group_norm.GroupNorm:
    # Each channel is a group.
    groups = {"num_groups": conv.channels}
  return make(conv.norm, epsilon=_EPSILON, **groups)


def _read_convolutions(fields: family.Fields) -> tuple[_Conv, ...]:
  defaults = {
    "conv_dim": [512] * 7,
    "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
    "conv_stride": [5, 2, 2, 2, 2, 2, 2],
  }
  lists = {}
  for name, default in defaults.items():
    value = fields.value(name, default)
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(type(x) is int and x > 0 for x in value):
      fields.reject(name, "a list of positive integers")
    lists[name] = value
  count = len(lists["conv_dim"])
  for name, value in lists.items():
    if len(value) != count:
      fields.reject(name, f"a list of {count} integers, as conv_dim")
  if fields.value("num_feat_extract_layers", count) != count:
    fields.reject("num_feat_extract_layers", f"{count}, as conv_dim")
  first, later = fields.map_value(
    "feat_extract_norm",
    "group",
    {
      "group": (group_norm.GroupNorm, None),
      "layer": (layer_norm.LayerNorm, layer_norm.LayerNorm),
    },
  )
  return tuple(
    _Conv(
      channels=channels,
      window=window,
      stride=stride,
      norm=later if i else first,
    )
    for i, (channels, window, stride) in enumerate(
      zip(*lists.values(), strict=True)
    )
  )


def _read(fields: family.Fields) -> _Wav2Vec2:
  found = towers.read(fields, layer_norm_eps=1e-5)
  embed_dim = found["sizes"]["D"]
  num_groups = fields.size("num_conv_pos_embedding_groups", 16)
  if embed_dim % num_groups:
    fields.reject(
      "num_conv_pos_embedding_groups", f"a divisor of hidden_size ({embed_dim})"
    )
  vocab_size = fields.size("vocab_size", 32)
  blank_id = fields.count("pad_token_id", 0)
  if blank_id >= vocab_size:
    fields.reject("pad_token_id", f"an id below vocab_size ({vocab_size})")
  is_pre_norm = fields.flag("do_stable_layer_norm", False)
  found["sizes"] |= {
    "V": vocab_size,
    "K": fields.size("num_conv_pos_embeddings", 128),
    "P": embed_dim // num_groups,
    "O": 1,
    "Q": 1,
    # Channels of the audio.
    "A": 1,
  }
  return _Wav2Vec2(
    convolutions=_read_convolutions(fields),
    conv_bias=fields.flag("conv_bias", False),
    num_groups=num_groups,
    conv_activation=fields.activation("feat_extract_activation", "gelu"),
    block_class=block.TransformerBlock if is_pre_norm else block.PostNormBlock,
    blank_id=blank_id,
    **found,
  )


def _make_example(config: Mapping[str, Any]) -> tuple[Any, ...]:
  """Returns a batch of the shortest audio that has two frames."""
  size = 2
  windows = config.get("conv_kernel", [10, 3, 3, 3, 3, 2, 2])
  strides = config.get("conv_stride", [5, 2, 2, 2, 2, 2, 2])
  for window, stride in zip(windows[::-1], strides[::-1], strict=True):
    size = (size - 1) * stride + window
  lengths = jnp.full((1,), size, jnp.int32)
  return ({"audio": jnp.zeros((1, size)), "audio_lengths": lengths},)


FAMILY = family.Family(
  model_type="wav2vec2",
  architecture="Wav2Vec2ForCTC",
  read=_read,
  inert=tuple(_INERT.split()),
  neutral={"add_adapter": (False,), "adapter_attn_dim": (None,)},
  example=_make_example,
)
