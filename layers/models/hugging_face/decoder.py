"""Decoders of Hugging Face: one description of most families.

Families read their `config.json` into a `Decoder`, which makes the model and
the names of its weights; `decoder_table` has families as tables of its fields.
Names of tensors are those of Llama, in which a family replaces parts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from paxon.layers.models.hugging_face import (
  attention_layers,
  block_layers,
  delta_layers,
  expert_layers,
  family,
  latent_layers,
  mapping,
  rope,
)
from paxon.layers.positions import position_embedding
from paxon.layers.stacks import stack, stochastic_residual

_EMBEDDING = """
  model.embed_tokens.weight  params/embedding/table   V D -> V D
"""
_POSITIONS = """
  model.embed_positions.weight  params/position_embedding/table  Z D -> Z D
"""
_HEAD_BIAS = """
  lm_head.bias  params/{head}/bias  V -> V
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
    is_rotary: Whether its attention has rotary positions.
  """

  window: int | None
  is_mixture: bool
  is_delta: bool
  is_rotary: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
  """The embedding and the head of a decoder.

  Attributes:
    size: Number of ids.
    tied: Whether the head shares the embedding table.
    input_scale: Factor on embedded tokens.
    logit_scale: Factor on the logits.
    logit_cap: Soft cap of the logits; `None` is none.
    head_bias: Whether the head has a bias.
  """

  size: int
  tied: bool
  input_scale: float = 1.0
  logit_scale: float = 1.0
  logit_cap: float | None = None
  head_bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """Hyperparameters of a decoder.

  Attributes:
    vocabulary: Embedding and head.
    embed_dim: Width of the residual stream.
    attention: The attention of all layers that have no delta net.
    feed_forward: The feed-forward layer of all layers without experts.
    windows: Sliding window of each layer; `None` is full attention.
    rope: Rotary positions; `None` is none.
    positions: Number of learned positions; `None` is none.
    position_offset: Rows of their table before that of the first position.
    norm: All norms of tokens.
    form: Where blocks have their norms.
    embedding_norm: Whether embedded tokens are normalized.
    residual_scale: Factor on what a layer adds to the residual stream.
    local_rope: Rotary positions of layers with a window; `None` is `rope`.
    unrotated: Layers without rotary positions.
    experts: The mixture of experts in place of feed-forward layers; `None` is
      none.
    dense_layers: Layers that have a feed-forward layer beside mixtures.
    delta: Gated delta nets in place of attention in some layers; `None` is
      none.
    num_nextn_predict_layers: Further layers in files: modules of `multi_token`.
    tensors: Parts of names of tensors in files, by those of Llama; replaced in
      this order.
    ignored: Further names of tensors that are not weights, as in
      `mapping.Names`.
  """

  vocabulary: Vocabulary
  embed_dim: int
  feed_forward: block_layers.FeedForward
  attention: attention_layers.Attention | latent_layers.Latent
  windows: tuple[int | None, ...]
  rope: rope.Rope | None
  norm: block_layers.Norm
  form: block_layers.Form = block_layers.PRE_NORM
  positions: int | None = None
  position_offset: int = 0
  embedding_norm: bool = False
  residual_scale: float = 1.0
  local_rope: rope.Rope | None = None
  unrotated: tuple[int, ...] = ()
  experts: expert_layers.Experts | None = None
  dense_layers: tuple[int, ...] = ()
  delta: delta_layers.Delta | None = None
  num_nextn_predict_layers: int = 0
  tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
  ignored: tuple[str, ...] = ()

  @property
  def _layers(self) -> tuple[_Layer, ...]:
    delta = () if self.delta is None else self.delta.layers
    return tuple(
      _Layer(
        window=window,
        is_mixture=self.experts is not None and i not in self.dense_layers,
        is_delta=i in delta,
        is_rotary=self.rope is not None and i not in self.unrotated,
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
        norm=lambda: self.norm.model(make),
        stack=lambda: make(
          stack.Stack,
          blocks=[self._block(make, self._layers[-1])],
          num_layers=1,
        ),
        num_depths=self.num_nextn_predict_layers,
        weight=_FURTHER_WEIGHT,
      )
    if self.positions is not None:
      further["position_embedding"] = make(
        position_embedding.LearnedPositions,
        max_length=self.positions,
        offset=self.position_offset,
      )
    if self.embedding_norm:
      further["embedding_norm"] = self.norm.model(make)
    return family.make_decoder(
      make,
      vocab_size=self.vocabulary.size,
      embed_dim=self.embed_dim,
      input_scale=self.vocabulary.input_scale,
      logit_scale=self.vocabulary.logit_scale,
      stacks=[
        (
          [self._block(make, each) for each in mapping.find_period(layers)],
          len(layers),
        )
        for layers in self._stacks
      ],
      final_norm=self.norm.model(make),
      tied=self.vocabulary.tied,
      head_bias=self.vocabulary.head_bias,
      logit_cap=self.vocabulary.logit_cap,
      **further,
    )

  def _block(self, make: Callable[..., Any], layer: _Layer) -> Any:
    further = {field: self.norm.model(make) for field in self.form.norms}
    if self.residual_scale != 1:
      further["residual"] = make(
        stochastic_residual.StochasticResidual,
        residual_weight=self.residual_scale,
      )
    return make(
      self.form.block,
      attention=self._attention(make, layer),
      feed_forward=self._feed_forward(make, layer.is_mixture),
      **further,
    )

  def _feed_forward(self, make: Callable[..., Any], is_mixture: bool) -> Any:
    if is_mixture:
      assert self.experts is not None
      activation = self.feed_forward.activation
      return self.experts.model(make, activation=activation)
    return self.feed_forward.model(make)

  def _attention(self, make: Callable[..., Any], layer: _Layer) -> Any:
    if layer.is_delta:
      assert self.delta is not None
      return self.delta.model(
        make,
        activation=self.feed_forward.activation,
        epsilon=self.norm.epsilon,
      )
    positions = self.rope if layer.is_rotary else None
    if isinstance(self.attention, latent_layers.Latent):
      assert positions is not None
      return self.attention.model(make, positions=positions)
    if layer.window is not None and self.local_rope is not None:
      positions = self.local_rope
    return self.attention.model(
      make, window=layer.window, positions=positions, norm=self.norm
    )

  def _table(self) -> str:
    """Returns the rules of variables outside of layers."""
    table = _EMBEDDING + self.norm.table("model.norm", "params/final_norm")
    table += "" if self.positions is None else _POSITIONS
    if self.embedding_norm:
      table += self.norm.table("model.embed_norm", "params/embedding_norm")
    table += "" if self.vocabulary.tied else family.HEAD
    if self.vocabulary.head_bias:
      head = "embedding" if self.vocabulary.tied else "head"
      table += _HEAD_BIAS.format(head=head)
    return table

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    return mapping.Names(
      sizes={
        "V": self.vocabulary.size,
        "D": self.embed_dim,
        "F": self.feed_forward.mlp_dim,
        "Z": (self.positions or 0) + self.position_offset,
        **self.attention.sizes(),
        **(self.experts.sizes() if self.experts else {}),
        **(self.delta.sizes() if self.delta else {}),
        **({"X": 2 * self.embed_dim} if self.num_nextn_predict_layers else {}),
      },
      rules=(
        *mapping.parse_rules(self._table()),
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
        *self.ignored,
      ),
      prefix="model.",
    ).rename(self.tensors)

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
    head = table if self.vocabulary.tied else "lm_head.weight"
    tied = {"lm_head.weight": table} if self.vocabulary.tied else {}
    for i in range(self.num_nextn_predict_layers):
      at = f"model.layers.{len(self.windows) + i}"
      tied[f"{at}.embed_tokens.weight"] = table
      tied[f"{at}.shared_head.head.weight"] = head
    return tied

  def _layer_rules(self, layers: Sequence[_Layer]) -> tuple[mapping.Rule, ...]:
    at = "model.layers.{}."
    delta = tuple(i for i, layer in enumerate(layers) if layer.is_delta)
    dense = tuple(i for i, layer in enumerate(layers) if not layer.is_mixture)
    rules = [
      rule
      for field, tensor in self.form.norms.items()
      for rule in mapping.parse_rules(self.norm.table(tensor, field), at=at)
    ]
    if self.delta is not None:
      rules += self.delta.rules(at, delta)
    rest = tuple(i for i in range(len(layers)) if i not in delta)
    rules += self.attention.rules(at, rest, self.norm)
    rules += self.feed_forward.rules(at, dense)
    if self.experts is not None:
      mixtures = tuple(i for i in range(len(layers)) if i not in dense)
      rules += self.experts.rules(at, mixtures)
    return tuple(rules)
