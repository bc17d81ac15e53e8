"""Vision transformers with a classifier (`ViTForImageClassification`).

Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929. The model is a
`classifier.Classifier` of `batch["images"]`, [B,H,W,C] with normalized pixels.
Positions of other image sizes are interpolated.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from paxon.layers import linear
from paxon.layers.models import classifier
from paxon.layers.models.hugging_face import (
  family,
  mapping,
)
from paxon.layers.models.hugging_face.media import towers
from paxon.layers.vision import vit
from paxon.sharding import axes

_EMBEDDINGS = f"""
  cls_token                           learned_tokens_before  T (1:0) D -> T D
  position_embeddings                 positions/table        (1:0) P D -> P D
  patch_embeddings.projection.weight  projection/kernel  {towers.PATCH_KERNEL}
  patch_embeddings.projection.bias    projection/bias        D -> D
"""
_HEAD = """
  vit.layernorm  params/encoder/final_norm  norm
  classifier     params/head/kernel         L D -> D L + bias
"""
_LAYER = """
  layernorm_before        attention_norm     norm
  attention.output.dense  attention/out      D (N H) -> N H D + bias
  layernorm_after         feed_forward_norm  norm
  intermediate.dense      feed_forward/up    F D -> D F + bias
  output.dense            feed_forward/down  D F -> F D + bias
"""
_HEADS = "query", "key", "value"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ViT:
  """Hyperparameters of a ViT with `num_labels` classes."""

  tower: towers.ImageTower
  num_labels: int

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""
    return make(
      classifier.Classifier,
      encoder=self.tower.encoder(make, pooling=vit.pool_first),
      head=make(
        linear.Linear,
        output_dim=self.num_labels,
        kernel_axes=(axes.EMBED, None),
      ),
      input_keys=("images",),
    )

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    at = "vit.encoder.layer.{}."
    rules = [*mapping.parse_rules(_LAYER, at=at)]
    for name in _HEADS:
      tensor, leaf = f"{at}attention.attention.{name}", f"attention/{name}"
      rules.append(mapping.rule(f"{tensor}.weight", leaf, "(N H) D -> D N H"))
      if self.tower.use_bias:
        bias = mapping.rule(f"{tensor}.bias", f"{leaf}_bias", "(N H) -> N H")
        rules.append(bias)
    return mapping.Names(
      sizes={**self.tower.sizes, "L": self.num_labels},
      rules=(
        *mapping.parse_rules(
          _EMBEDDINGS, at="vit.embeddings.", to="params/encoder/"
        ),
        *mapping.parse_rules(_HEAD),
      ),
      stacks=(
        mapping.StackRules(
          stack="params/encoder/stack",
          num_layers=self.tower.num_layers,
          rules=tuple(rules),
        ),
      ),
      # The class has none; files of `ViTModel` do.
      ignored=(r"vit\.pooler\.dense\.(weight|bias)",),
    )


def _read(fields: family.Fields) -> _ViT:
  labels = fields.get("id2label", None)
  if not isinstance(labels, dict | None):
    fields.reject("id2label", "an object or null")
  return _ViT(
    tower=towers.read_image(
      fields,
      num_tokens=1,
      patch_size=16,
      use_bias=fields.flag("qkv_bias", True),
      layer_norm_eps=1e-12,
    ),
    # Files list the labels, if these are not two without names.
    num_labels=len(labels) if labels else fields.size("num_labels", 2),
  )


def _make_example(config: Mapping[str, Any]) -> tuple[Any, ...]:
  return ({"images": towers.make_images(config)},)


FAMILY = family.Family(
  model_type="vit",
  architecture="ViTForImageClassification",
  read=_read,
  # Those of other classes of transformers.
  inert=("encoder_stride", "pooler_act", "pooler_output_size"),
  example=_make_example,
)
