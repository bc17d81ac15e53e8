"""Transformer towers with one kind of layer, as in BERT, ViT, CLIP and SigLIP.

Letters of sizes: D embed, F mlp, N heads, H head_dim; of images C channels, R
and S height and width of a patch, P positions, T (1) learned vectors.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

from paxon.layers import activations, feed_forward, linear
from paxon.layers.attention import grouped_query, projections
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models.hugging_face import family, mapping
from paxon.layers.norms import layer_norm
from paxon.layers.stacks import block, stack
from paxon.layers.vision import vit
from paxon.sharding import axes

# The rules of a patch embedding; columns of the kernel are (row, column, c).
PATCH_KERNEL = "D C R S -> (R S C) D"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
  """Hyperparameters of a tower.

  Attributes:
    sizes: Sizes by letter.
    num_layers: Number of layers.
    epsilon: Epsilon of all norms.
    activation: Activation of the feed-forward layers.
    use_bias: Whether queries, keys and values have a bias; all else has.
    causal: Whether attention is causal.
    block_class: Pre-norm or post-norm block.
  """

  sizes: Mapping[str, int]
  num_layers: int
  epsilon: float
  activation: activations.Activation
  use_bias: bool = True
  causal: bool = False
  block_class: type[block.Block] = block.TransformerBlock

  def norm(self, make: Callable[..., Any]) -> Any:
    """Returns a norm."""
    return make(layer_norm.LayerNorm, epsilon=self.epsilon)

  def feed_forward(self, make: Callable[..., Any]) -> Any:
    """Returns a feed-forward layer."""
    return make(
      feed_forward.FeedForward,
      mlp_dim=self.sizes["F"],
      activation=self.activation,
    )

  def stack(self, make: Callable[..., Any]) -> Any:
    """Returns the layers."""
    layer = make(
      self.block_class,
      attention_norm=self.norm(make),
      attention=make(
        grouped_query.GroupedQueryAttention,
        num_heads=self.sizes["N"],
        num_kv_heads=self.sizes["N"],
        head_dim=self.sizes["H"],
        mask=make(attention_mask.MaskRules, causal=self.causal),
        projections=make(
          projections.SeparateProjections,
          use_bias=self.use_bias,
          output_bias=None if self.use_bias else True,
        ),
      ),
      feed_forward_norm=self.norm(make),
      feed_forward=self.feed_forward(make),
    )
    return make(stack.Stack, blocks=[layer], num_layers=self.num_layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTower(Tower):
  """Hyperparameters of a tower of images.

  Attributes:
    grid: Number of patches vertically and horizontally.
    num_tokens: Number of tokens before the patches, with positions.
  """

  grid: tuple[int, int]
  num_tokens: int

  def encoder(
    self, make: Callable[..., Any], *, patch_bias: bool = True, **fields: Any
  ) -> Any:
    """Returns the encoder; `fields` are further ones of `VisionTransformer`."""
    return make(
      vit.VisionTransformer,
      patch_size=self.sizes["R"],
      projection=make(
        linear.Linear,
        output_dim=self.sizes["D"],
        use_bias=patch_bias,
        kernel_axes=(None, axes.EMBED),
      ),
      positions=make(
        vit.PatchPositions,
        height=self.grid[0],
        width=self.grid[1],
        tokens_before=self.num_tokens,
      ),
      tokens_before=self.num_tokens,
      stack=self.stack(make),
      final_norm=self.norm(make),
      **fields,
    )


def read(
  fields: family.Fields,
  *,
  layer_norm_eps: float,
  hidden_size: int = 768,
  num_attention_heads: int = 12,
  intermediate_size: int = 3072,
  hidden_act: str = "gelu",
) -> dict[str, Any]:
  """Returns the fields of `Tower`; the others are defaults of `config.json`.

  Raises:
    UnsupportedConfigError: A field has an unsupported value.
  """
  embed_dim = fields.size("hidden_size", hidden_size)
  num_heads = fields.size("num_attention_heads", num_attention_heads)
  if embed_dim % num_heads:
    fields.reject(
      "num_attention_heads", f"a divisor of hidden_size ({embed_dim})"
    )
  return {
    "sizes": {
      "D": embed_dim,
      "F": fields.size("intermediate_size", intermediate_size),
      "N": num_heads,
      "H": embed_dim // num_heads,
    },
    "num_layers": fields.size("num_hidden_layers", 12),
    "epsilon": fields.number("layer_norm_eps", layer_norm_eps),
    "activation": fields.activation("hidden_act", hidden_act),
  }


def read_image(
  fields: family.Fields,
  *,
  num_tokens: int,
  patch_size: int,
  use_bias: bool = True,
  **defaults: Any,
) -> ImageTower:
  """Returns the tower of images with tokens before the patches.

  Raises:
    UnsupportedConfigError: A field has an unsupported value.
  """
  found = read(fields, **defaults)
  patch, other = _read_pair(fields, "patch_size", patch_size)
  if patch != other:
    fields.reject("patch_size", "squares")
  height, width = _read_pair(fields, "image_size", 224)
  if height % patch or width % patch:
    fields.reject("image_size", f"multiples of patch_size ({patch})")
  grid = height // patch, width // patch
  sizes = {
    "C": fields.size("num_channels", 3),
    "R": patch,
    "S": patch,
    "P": num_tokens + grid[0] * grid[1],
    # Learned vectors: a token, or the query of a pooling.
    "T": 1,
  }
  found["sizes"] |= sizes
  return ImageTower(
    grid=grid, num_tokens=num_tokens, use_bias=use_bias, **found
  )


def make_images(config: Mapping[str, Any]) -> jax.Array:
  """Returns one image of the size in a configuration."""
  size = config.get("image_size", 224)
  height, width = size if isinstance(size, list | tuple) else (size, size)
  return jnp.zeros((1, height, width, config.get("num_channels", 3)))


def mark_sizes(
  rules: Iterable[mapping.Rule], mark: str
) -> tuple[mapping.Rule, ...]:
  """Returns rules with letters followed by `mark`, for one of two towers."""
  return tuple(
    dataclasses.replace(
      rule,
      variables=tuple(
        (leaf, re.sub(r"\b([A-Z])\b", rf"\1{mark}", pattern))
        for leaf, pattern in rule.variables
      ),
    )
    for rule in rules
  )


def _read_pair(
  fields: family.Fields, name: str, default: int
) -> tuple[int, int]:
  value = fields.value(name, default)
  if not isinstance(value, list | tuple):
    return (fields.size(name, default),) * 2
  if len(value) != 2 or not all(type(x) is int and x > 0 for x in value):
    fields.reject(name, "a positive integer, or a pair of them")
  return value[0], value[1]
