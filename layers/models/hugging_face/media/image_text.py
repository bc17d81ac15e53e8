"""Contrastive models of images and texts: CLIP and SigLIP.

Radford et al. 2021, https://arxiv.org/abs/2103.00020; Zhai et al. 2023,
https://arxiv.org/abs/2303.15343. The models are `image_text.ImageTextModel` of
`batch["images"]`, [B,H,W,C] with normalized pixels, and `batch["inputs"]`. The
texts of SigLIP are padded to one length, 64, and padding is not masked.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp

from paxon.layers import embedding, linear
from paxon.layers.attention import cross_attention, projections
from paxon.layers.losses import contrastive_losses
from paxon.layers.models import image_text, masked_lm
from paxon.layers.models.hugging_face import (
  family,
  mapping,
)
from paxon.layers.models.hugging_face.media import towers
from paxon.layers.positions import position_embedding
from paxon.layers.vision import vit
from paxon.sharding import axes

# Letters after those of the sizes of each tower.
_IMAGE, _TEXT = "i", "t"
_HEADS = """
  q_proj  query  (N H) D -> D N H + bias
  k_proj  key    (N H) D -> D N H + bias
  v_proj  value  (N H) D -> D N H + bias
"""
_OUT = """
  out_proj  out  D (N H) -> N H D + bias
"""
_MLP = """
  fc1  up    F D -> D F + bias
  fc2  down  D F -> F D + bias
"""
_TEXT_RULES = """
  embeddings.token_embedding.weight     embedding/table           V D -> V D
  embeddings.position_embedding.weight  position_embedding/table  P D -> P D
  final_layer_norm                      final_norm                norm
"""
_IMAGE_RULES = f"""
  embeddings.patch_embedding.weight     projection/kernel {towers.PATCH_KERNEL}
  embeddings.position_embedding.weight  positions/table           P D -> P D
  post_layernorm                        final_norm                norm
"""
_CLIP_IMAGE_RULES = """
  embeddings.class_embedding  learned_tokens_before  (T D) -> T D
  pre_layrnorm                embedding_norm         norm
"""
_CLIP_RULES = """
  logit_scale               params/log_scale                () ->
  visual_projection.weight  params/image_projection/kernel  Z Di -> Di Z
  text_projection.weight    params/text_projection/kernel   Z Dt -> Dt Z
"""
_SIGLIP_IMAGE_RULES = """
  embeddings.patch_embedding.bias  projection/bias  D -> D
  head.probe                       pooling/query    T (1:0) D -> T D
  head.layernorm                   pooling/norm     norm
"""
_SIGLIP_RULES = """
  logit_scale      params/log_scale               (1:0) ->
  logit_bias       params/bias                    (1:0) ->
  text_model.head  params/text_projection/kernel  Z Dt -> Dt Z + bias
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ImageText:
  """Hyperparameters of both models.

  Attributes:
    image: The tower of images.
    text: The tower of texts.
    width: Number of features of both.
    is_siglip: Which of the two models it is.
    end_id: Id of the last token of a text; None is the largest of each.
  """

  image: towers.ImageTower
  text: towers.Tower
  width: int
  is_siglip: bool
  end_id: int | None = None

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""

    def project(use_bias: bool) -> Any:
      return make(
        linear.Linear,
        output_dim=self.width,
        use_bias=use_bias,
        kernel_axes=(axes.EMBED, None),
      )

    text = make(
      masked_lm.TextEncoder,
      embedding=make(
        embedding.Embedding,
        vocab_size=self.text.sizes["V"],
        embed_dim=self.text.sizes["D"],
      ),
      position_embedding=make(
        position_embedding.LearnedPositions, max_length=self.text.sizes["P"]
      ),
      stack=self.text.stack(make),
      final_norm=self.text.norm(make),
    )
    shared = {"text_encoder": text, "text_keys": ("inputs",)}
    if self.is_siglip:
      return make(
        image_text.ImageTextModel,
        image_encoder=self.image.encoder(make, pooling=self._pooling(make)),
        text_pooling=image_text.pool_last_position,
        text_projection=project(use_bias=True),
        contrast=contrastive_losses.sigmoid,
        initial_scale=10.0,
        initial_bias=-10.0,
        **shared,
      )
    pooling = image_text.pool_largest_id
    if self.end_id is not None:
      pooling = make(image_text.FirstId, id=self.end_id)
    return make(
      image_text.ImageTextModel,
      image_encoder=self.image.encoder(
        make,
        patch_bias=False,
        embedding_norm=self.image.norm(make),
        pooling=vit.pool_first,
      ),
      text_pooling=pooling,
      image_projection=project(use_bias=False),
      text_projection=project(use_bias=False),
      **shared,
    )

  def _pooling(self, make: Callable[..., Any]) -> Any:
    num_heads = self.image.sizes["N"]
    return make(
      vit.AttentionPooling,
      attention=make(
        cross_attention.CrossAttention,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=self.image.sizes["H"],
        projections=make(projections.SeparateProjections, use_bias=True),
      ),
      norm=self.image.norm(make),
      feed_forward=self.image.feed_forward(make),
    )

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    rules = [*mapping.parse_rules(_IMAGE_RULES, at="vision_model.")]
    if self.is_siglip:
      rules += mapping.parse_rules(_SIGLIP_IMAGE_RULES, at="vision_model.")
      rules += _pooling_rules("vision_model.head.")
    else:
      rules += mapping.parse_rules(_CLIP_IMAGE_RULES, at="vision_model.")
    image = _scope(rules, "params/image_encoder/")
    text = mapping.parse_rules(
      _TEXT_RULES, at="text_model.", to="params/text_encoder/"
    )
    return mapping.Names(
      sizes={
        "Z": self.width,
        **{f"{k}{_IMAGE}": n for k, n in self.image.sizes.items()},
        **{f"{k}{_TEXT}": n for k, n in self.text.sizes.items()},
      },
      rules=(
        *towers.mark_sizes(image, _IMAGE),
        *towers.mark_sizes(text, _TEXT),
        *mapping.parse_rules(_SIGLIP_RULES if self.is_siglip else _CLIP_RULES),
      ),
      stacks=(
        _stack_rules("vision_model", "image_encoder", self.image, _IMAGE),
        _stack_rules("text_model", "text_encoder", self.text, _TEXT),
      ),
      # Of old files.
      ignored=(r"(vision|text)_model\.embeddings\.position_ids",),
    )


def _scope(rules: list[mapping.Rule], to: str) -> tuple[mapping.Rule, ...]:
  return tuple(
    dataclasses.replace(
      rule, variables=tuple((to + leaf, x) for leaf, x in rule.variables)
    )
    for rule in rules
  )


def _pooling_rules(at: str) -> list[mapping.Rule]:
  """Returns the rules of a pooling head, whose heads are one tensor."""
  heads, to = ("query", "key", "value"), "pooling/attention/"
  weights = [(f"{to}{name}", "(N H) D -> D N H") for name in heads]
  biases = [(f"{to}{name}_bias", "(N H) -> N H") for name in heads]
  return [
    mapping.fused_rule(f"{at}attention.in_proj_weight", *weights),
    mapping.fused_rule(f"{at}attention.in_proj_bias", *biases),
    *mapping.parse_rules(_OUT, at=f"{at}attention.", to=to),
    *mapping.parse_rules(_MLP, at=f"{at}mlp.", to="pooling/feed_forward/"),
  ]


def _stack_rules(
  name: str, encoder: str, tower: towers.Tower, mark: str
) -> mapping.StackRules:
  at = f"{name}.encoder.layers.{{}}."
  rules = [
    *mapping.parse_rules(_HEADS + _OUT, at=f"{at}self_attn.", to="attention/"),
    *mapping.parse_rules(_MLP, at=f"{at}mlp.", to="feed_forward/"),
    *mapping.parse_rules("layer_norm1 attention_norm norm", at=at),
    *mapping.parse_rules("layer_norm2 feed_forward_norm norm", at=at),
  ]
  return mapping.StackRules(
    stack=f"params/{encoder}/stack",
    num_layers=tower.num_layers,
    rules=towers.mark_sizes(rules, mark),
  )


def _find_tower(
  fields: family.Fields, name: str, **neutral: tuple[Any, ...]
) -> family.Fields:
  """Returns the fields of a tower."""
  found = fields.get(name, None)
  if fields.get("model_type") == "clip":
    # Of old files; it replaces the other.
    old = fields.get(f"{name}_dict", None)
    found = found if old is None else old
  if found is not None and not isinstance(found, dict):
    fields.reject(name, "a JSON object")
  kind = f"{fields.get('model_type')}_{name.removesuffix('_config')}_model"
  values = {"model_type": kind, **(found or {})}
  if values["model_type"] != kind:
    fields.reject(name, f"model_type {kind!r}")
  return family.Fields(
    {**values, "architectures": None},
    architectures=("tower",),
    # Projections are those of the whole model.
    inert=("projection_dim", "dropout"),
    neutral=neutral,
  )


def _finish(fields: family.Fields, name: str, tower: family.Fields) -> None:
  """Adds the ignored fields of a tower to those of the file."""
  for each in tower.find_ignored():
    fields.ignore(f"{name}.{each}")


def _read_text(
  fields: family.Fields,
  *,
  length: int,
  vocab_size: int,
  causal: bool,
  **defaults: Any,
) -> towers.Tower:
  found = towers.read(fields, **defaults)
  found["sizes"] |= {
    "V": fields.size("vocab_size", vocab_size),
    "P": fields.size("max_position_embeddings", length),
  }
  return towers.Tower(causal=causal, **found)


def _read_clip(fields: family.Fields) -> _ImageText:
  numbers = {"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
  image_fields = _find_tower(fields, "vision_config")
  image = towers.read_image(
    image_fields,
    num_tokens=1,
    patch_size=32,
    **numbers,
  )
  _finish(fields, "vision_config", image_fields)
  text_fields = _find_tower(fields, "text_config")
  text = _read_text(
    text_fields,
    length=77,
    causal=True,
    vocab_size=49_408,
    hidden_size=512,
    num_attention_heads=8,
    intermediate_size=2048,
    **numbers,
  )
  end_id = text_fields.count("eos_token_id", 49_407)
  _finish(fields, "text_config", text_fields)
  return _ImageText(
    image=image,
    text=text,
    width=fields.size("projection_dim", 512),
    is_siglip=False,
    # Wrong in the first files; it stands for the largest id.
    end_id=None if end_id == 2 else end_id,
  )


def _read_siglip(fields: family.Fields) -> _ImageText:
  numbers = {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
  image_fields = _find_tower(fields, "vision_config", vision_use_head=(True,))
  image = towers.read_image(
    image_fields,
    num_tokens=0,
    patch_size=16,
    **numbers,
  )
  _finish(fields, "vision_config", image_fields)
  text_fields = _find_tower(fields, "text_config")
  text = _read_text(
    text_fields,
    length=64,
    causal=False,
    vocab_size=32_000,
    hidden_size=768,
    **numbers,
  )
  width = image.sizes["D"]
  given = text_fields.optional_size("projection_size") or text.sizes["D"]
  if given != width:
    text_fields.reject(
      "projection_size", f"the hidden_size of images ({width})"
    )
  _finish(fields, "text_config", text_fields)
  return _ImageText(image=image, text=text, width=width, is_siglip=True)


def _make_example(config: Mapping[str, Any]) -> tuple[Any, ...]:
  image = config.get("vision_config_dict") or config.get("vision_config") or {}
  images = towers.make_images(image)
  return ({"images": images, "inputs": jnp.zeros((1, 2), jnp.int32)},)


CLIP = family.Family(
  model_type="clip",
  architecture="CLIPModel",
  read=_read_clip,
  # An initial value.
  inert=("logit_scale_init_value",),
  example=_make_example,
)
SIGLIP = family.Family(
  model_type="siglip",
  architecture="SiglipModel",
  read=_read_siglip,
  example=_make_example,
)
