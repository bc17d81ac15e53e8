"""Decoders with gated feed-forward layers: Llama, Mistral, Qwen, Phi-3, Gemma.

Root-mean-square norms and rotary positions; layers of Qwen3-Next may have a
gated delta net in place of attention.
Families read their `config.json` into a `GatedDecoder`, which makes the model
and the names of its weights; their `sizes` are those of `mapping.Names`.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any, NamedTuple

from paxon.layers import activations, feed_forward
from paxon.layers.models.hugging_face import (
  attention_layers,
  delta_layers,
  expert_layers,
  family,
  latent_layers,
  mapping,
  rope,
)
from paxon.layers.norms import rms_norm
from paxon.layers.stacks import block, stack

_MODEL = """
  model.embed_tokens.weight  params/embedding/table   V D -> V D
  model.norm.weight          params/final_norm/scale  D -> D
"""
_LAYER = """
  input_layernorm.weight  attention_norm/scale  D -> D
"""
_NORM = """
  post_attention_layernorm.weight  feed_forward_norm/scale  D -> D
"""
_POST_NORMS = """
  post_attention_layernorm.weight    post_attention_norm/scale     D -> D
  pre_feedforward_layernorm.weight   feed_forward_norm/scale       D -> D
  post_feedforward_layernorm.weight  post_feed_forward_norm/scale  D -> D
"""
_DOWN = """
  mlp.down_proj.weight  feed_forward/down  D F -> F D
"""
_GATE_UP = """
  mlp.gate_proj.weight  feed_forward/gate  F D -> D F
  mlp.up_proj.weight    feed_forward/up    F D -> D F
"""
_MLP_BIAS = """
  mlp.gate_proj.bias  feed_forward/gate_bias  F -> F
  mlp.up_proj.bias    feed_forward/up_bias    F -> F
  mlp.down_proj.bias  feed_forward/down_bias  D -> D
"""
_FURTHER = """
  enorm.weight             {at}/embedding_norm/scale  D -> D
  hnorm.weight             {at}/hidden_norm/scale     D -> D
  eh_proj.weight           {at}/projection/kernel     D X -> X D
  shared_head.norm.weight  {at}/final_norm/scale      D -> D
"""
# Of the last part of DeepSeek-V3's training.
_FURTHER_WEIGHT = 0.1


class _Layer(NamedTuple):
  """Properties in which the layers of a model differ.

  Attributes:
    window: Sliding window of its attention; `None` is full attention.
    is_mixture: Whether it has a mixture of experts.
    is_delta: Whether it has a gated delta net in place of attention.
  """

  window: int | None
  is_mixture: bool
  is_delta: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDecoder:
  """Hyperparameters of a gated decoder.

  Attributes, besides sizes:
    attention: The attention of all layers that have no delta net.
    windows: Sliding window of each layer; `None` is full attention.
    rope: Rotary positions.
    activation: Activation of the gate.
    epsilon: Epsilon of all norms.
    tied: Whether the head shares the embedding table.
    mlp_bias: Whether the feed-forward layers have biases.
    is_fused: Whether files fuse the gate with the up projection.
    norm_offset: Offset of the stored scale of norms.
    input_scale: Factor on embedded tokens.
    logit_cap: Soft cap of the head's logits.
    local_rope: Rotary positions of layers with a window; `None` is `rope`.
    has_post_norms: Whether the outputs of attention and feed-forward layers are
      normalized.
    experts: The mixture of experts in place of feed-forward layers; `None` is
      none.
    dense_layers: Layers that have a feed-forward layer beside mixtures.
    delta: Gated delta nets in place of attention in some layers; `None` is
      none.
    num_nextn_predict_layers: Further layers in files: modules of `multi_token`.
  """

  vocab_size: int
  embed_dim: int
  mlp_dim: int
  attention: attention_layers.Attention | latent_layers.Latent
  windows: tuple[int | None, ...]
  rope: rope.Rope
  activation: activations.Activation
  epsilon: float
  tied: bool
  mlp_bias: bool = False
  is_fused: bool = False
  norm_offset: float = 0.0
  input_scale: float = 1.0
  logit_cap: float | None = None
  local_rope: rope.Rope | None = None
  has_post_norms: bool = False
  experts: expert_layers.Experts | None = None
  dense_layers: tuple[int, ...] = ()
  delta: delta_layers.Delta | None = None
  num_nextn_predict_layers: int = 0

  @property
  def _layers(self) -> tuple[_Layer, ...]:
    delta = () if self.delta is None else self.delta.layers
    return tuple(
      _Layer(
        window=window,
        is_mixture=self.experts is not None and i not in self.dense_layers,
        is_delta=i in delta,
      )
      for i, window in enumerate(self.windows)
    )

  @property
  def _stacks(self) -> tuple[tuple[_Layer, ...], ...]:
    """The layers of each stack: dense ones that come first are separate.

    Only if fewer blocks are compiled then: these have no common pattern.
    """
    layers, first = self._layers, len(self.dense_layers)
    parts = layers[:first], layers[first:]
    if self.dense_layers != tuple(range(first)) or not all(parts):
      return (layers,)
    blocks = [len(mapping.find_period(each)) for each in (*parts, layers)]
    return parts if blocks[0] + blocks[1] < blocks[2] else (layers,)

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns a `DecoderLm`, built by `make(cls, **fields)`."""
    further = {}
    if self.num_nextn_predict_layers:
      # Other models do not load it.
      from paxon.layers.models import multi_token

      further["multi_token"] = multi_token.compose(
        make,
        embed_dim=self.embed_dim,
        norm=lambda: self._norm(make, rms_norm.RmsNorm),
        stack=lambda: make(
          stack.Stack,
          blocks=[self._block(make, self._layers[-1])],
          num_layers=1,
        ),
        num_depths=self.num_nextn_predict_layers,
        weight=_FURTHER_WEIGHT,
      )
    return family.make_decoder(
      make,
      vocab_size=self.vocab_size,
      embed_dim=self.embed_dim,
      input_scale=self.input_scale,
      stacks=[
        (
          [self._block(make, each) for each in mapping.find_period(layers)],
          len(layers),
        )
        for layers in self._stacks
      ],
      final_norm=self._norm(make, rms_norm.RmsNorm),
      tied=self.tied,
      logit_cap=self.logit_cap,
      **further,
    )

  def _norm(self, make: Callable[..., Any], cls: type) -> Any:
    return make(cls, epsilon=self.epsilon, scale_offset=self.norm_offset)

  def _block(self, make: Callable[..., Any], layer: _Layer) -> Any:
    def norm() -> Any:
      return self._norm(make, rms_norm.RmsNorm)

    kind, post_norms = block.TransformerBlock, {}
    if self.has_post_norms:
      kind = block.SandwichBlock
      names = "post_attention_norm", "post_feed_forward_norm"
      post_norms = {name: norm() for name in names}
    return make(
      kind,
      attention_norm=norm(),
      attention=self._attention(make, layer),
      feed_forward_norm=norm(),
      feed_forward=self._feed_forward(make, layer.is_mixture),
      **post_norms,
    )

  def _feed_forward(self, make: Callable[..., Any], is_mixture: bool) -> Any:
    if is_mixture:
      assert self.experts is not None
      return self.experts.model(make, activation=self.activation)
    return make(
      feed_forward.GatedFeedForward,
      mlp_dim=self.mlp_dim,
      activation=self.activation,
      use_bias=self.mlp_bias,
    )

  def _attention(self, make: Callable[..., Any], layer: _Layer) -> Any:
    if layer.is_delta:
      assert self.delta is not None
      return self.delta.model(
        make, activation=self.activation, epsilon=self.epsilon
      )
    if isinstance(self.attention, latent_layers.Latent):
      return self.attention.model(make, positions=self.rope)
    positions = self.rope
    if layer.window is not None and self.local_rope is not None:
      positions = self.local_rope
    return self.attention.model(
      make,
      window=layer.window,
      positions=positions,
      norm=lambda cls: self._norm(make, cls),
      epsilon=self.epsilon,
    )

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    head = "" if self.tied else family.HEAD
    return mapping.Names(
      sizes={
        "V": self.vocab_size,
        "D": self.embed_dim,
        "F": self.mlp_dim,
        **self.attention.sizes(),
        **(self.experts.sizes() if self.experts else {}),
        **(self.delta.sizes() if self.delta else {}),
        **({"X": 2 * self.embed_dim} if self.num_nextn_predict_layers else {}),
      },
      rules=(
        *mapping.parse_rules(_MODEL + head),
        *(
          each
          for i in range(self.num_nextn_predict_layers)
          for each in mapping.parse_rules(
            _FURTHER.format(at=f"params/multi_token/depths_{i}"),
            at=f"model.layers.{len(self.windows) + i}.",
          )
        ),
      ),
      stacks=(
        *(
          mapping.StackRules(
            stack=name,
            num_layers=len(layers),
            period=len(mapping.find_period(layers)),
            rules=self._layer_rules(layers),
            first=first,
          )
          for name, first, layers in self._named_stacks()
        ),
        *(
          mapping.StackRules(
            stack=f"params/multi_token/depths_{i}/stack",
            num_layers=1,
            rules=self._layer_rules(self._layers[-1:]),
            first=len(self.windows) + i,
          )
          for i in range(self.num_nextn_predict_layers)
        ),
      ),
      tied=self._find_tied(),
      ignored=(
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        r"model\.rotary_emb\.inv_freq",
        # Prediction of further tokens in Qwen3-Next, which transformers leaves
        # out, too.
        *((r"(model\.)?mtp\..*",) if self.delta else ()),
      ),
      prefix="model.",
    )

  def _named_stacks(
    self,
  ) -> Iterator[tuple[str, int, tuple[_Layer, ...]]]:
    """Yields name, number of the first layer, and layers of each stack."""
    first = 0
    for i, layers in enumerate(self._stacks):
      name = "params/stack"
      yield (
        name if len(self._stacks) == 1 else f"{name}/stacks_{i}",
        first,
        layers,
      )
      first += len(layers)

  def _find_tied(self) -> dict[str, str]:
    """Returns the tensors that are copies of the embedding or the head."""
    table = "model.embed_tokens.weight"
    head = table if self.tied else "lm_head.weight"
    tied = {"lm_head.weight": table} if self.tied else {}
    for i in range(self.num_nextn_predict_layers):
      at = f"model.layers.{len(self.windows) + i}"
      tied[f"{at}.embed_tokens.weight"] = table
      tied[f"{at}.shared_head.head.weight"] = head
    return tied

  def _layer_rules(self, layers: Sequence[_Layer]) -> tuple[mapping.Rule, ...]:
    at = "model.layers.{}."
    table = _LAYER + (_POST_NORMS if self.has_post_norms else _NORM)
    delta = tuple(i for i, layer in enumerate(layers) if layer.is_delta)
    return (
      *mapping.parse_rules(table, at=at),
      *(self.delta.rules(at, delta) if self.delta else ()),
      *self.attention.rules(
        at, tuple(i for i in range(len(layers)) if i not in delta)
      ),
      *self._feed_forward_rules(at, layers),
    )

  def _feed_forward_rules(
    self, at: str, layers: Sequence[_Layer]
  ) -> tuple[mapping.Rule, ...]:
    dense = tuple(i for i, layer in enumerate(layers) if not layer.is_mixture)
    mixtures = tuple(i for i in range(len(layers)) if i not in dense)
    table, rules = _DOWN, []
    if self.is_fused:
      rules.append(
        mapping.fused_rule(
          f"{at}mlp.gate_up_proj.weight",
          ("feed_forward/gate", "F D -> D F"),
          ("feed_forward/up", "F D -> D F"),
          layers=dense,
        )
      )
    else:
      table += _GATE_UP + (_MLP_BIAS if self.mlp_bias else "")
    rules += mapping.parse_rules(table, at=at, layers=dense)
    if self.experts is not None:
      rules += self.experts.rules(at, mixtures)
    return tuple(rules)
