"""What a call asks of an attention kernel, as data.

Known from the arguments of a call, or from the fields of a layer before
anything is traced. What is not known is left out and asks for nothing.
"""

from collections.abc import Mapping
import dataclasses
import enum
from typing import Any

import jax
from jax.typing import DTypeLike
import numpy as np

from paxon.layers.attention import mask as attention_mask


class Feature(enum.Enum):
  """What a call may ask for and not every kernel has."""

  LOGIT_CAP = "a cap of logits"
  BIAS = "a bias of logits"
  BIAS_MATRIX = "a bias of all pairs"
  SINKS = "sinks"
  PREFIX = "a prefix that sees itself"
  CHUNK = "chunks"
  WINDOW = "a window"
  RIGHT_WINDOW = "a window to the right"
  TWO_SIDED_WINDOW = "a window to both sides"
  NO_LIMIT = "no window"
  BIDIRECTIONAL = "later keys"
  CACHE = "keys of a cache"
  VALUE_WIDTH = "values of another width than keys"
  PACKED = "several documents in a row"
  SPLIT_ROWS = "rows split over devices"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What a call asks for.

  Attributes:
    head_dim: Width of a head, of queries and keys.
    dtype: Name of the dtype of queries, keys and values.
    platform: Where it runs: "cuda", "tpu" or "cpu".
    features: What is asked for, each with the words of who asks, such as
      `logit_cap is 30.0`.
  """

  head_dim: int | None = None
  dtype: str | None = None
  platform: str | None = None
  features: Mapping[Feature, str] = dataclasses.field(default_factory=dict)

  def asking(self, feature: Feature, words: str) -> "Request":
    """Returns it with one more feature."""
    return dataclasses.replace(self, features={**self.features, feature: words})


def of_call(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: Any | None = None,
  sinks: jax.Array | None = None,
) -> Request:
  """Returns what the arguments of a kernel ask for.

  Whether rows are packed is in the data, and where it runs is decided later.

  Args:
    query: Queries [B,T,N,H].
    key: Keys [B,S,K,H].
    value: Values [B,S,K,H'].
    mask: Which keys each query sees.
    logit_cap: As kernels take it.
    bias: As kernels take it, or a function that makes it.
    sinks: As kernels take it.
  """
  features = _of_mask(mask)
  if mask.q_prefix is not None:
    features[Feature.PREFIX] = "there is a prefix"
  if logit_cap is not None:
    features[Feature.LOGIT_CAP] = f"logit_cap is {logit_cap}"
  if callable(bias):
    features[Feature.BIAS] = "there is a bias"
  elif bias is not None:
    words = f"there is a bias of shape {bias.shape}"
    features |= {Feature.BIAS: words, Feature.BIAS_MATRIX: words}
  if sinks is not None:
    features[Feature.SINKS] = f"there are {sinks.shape[0]} sinks"
  if value.shape[-1] != key.shape[-1]:
    features[Feature.VALUE_WIDTH] = (
      f"values are {value.shape[-1]} wide and keys {key.shape[-1]}"
    )
  if query.shape[1] != key.shape[1] and mask.rules:
    features[Feature.CACHE] = (
      f"{query.shape[1]} queries see {key.shape[1]} keys by their positions"
    )
  return Request(
    head_dim=query.shape[-1],
    dtype=np.dtype(query.dtype).name,
    features=features,
  )


def of_layer(layer: Any, *, dtype: DTypeLike | None = None) -> Request:
  """Returns what the fields of a layer ask for.

  Args:
    layer: With fields as `GroupedQueryAttention` has them; those that it has
      not ask for nothing.
    dtype: Of its queries, keys and values, where the layer does not say.
  """
  features = _of_mask(layer) if hasattr(layer, "causal") else {}
  logit_cap = getattr(layer, "logit_cap", None)
  if logit_cap is not None:
    features[Feature.LOGIT_CAP] = f"logit_cap is {logit_cap}"
  for field in ("position_bias", "relative_position"):
    part = getattr(layer, field, None)
    if part is not None:
      features[Feature.BIAS] = f"{field} is {type(part).__name__}"
  if getattr(layer, "sinks", None) is not None:
    features[Feature.SINKS] = f"sinks is {type(layer.sinks).__name__}"
  head_dim = getattr(layer, "head_dim", None)
  if head_dim is not None:
    # Latent attention has a part with positions beside that without.
    head_dim += getattr(layer, "rope_dim", 0)
  value_dim = getattr(layer, "value_dim", None)
  if None not in (head_dim, value_dim) and value_dim != head_dim:
    words = f"values are {value_dim} wide and keys {head_dim}"
    features[Feature.VALUE_WIDTH] = words
  dtype = getattr(layer, "dtype", None) or dtype
  return Request(
    head_dim=head_dim,
    dtype=None if dtype is None else np.dtype(dtype).name,
    features=features,
  )


def _of_mask(rules: Any) -> dict[Feature, str]:
  """What a mask or a layer with fields of the same names asks for."""
  window, chunk = rules.window, getattr(rules, "chunk", None)
  right_window = getattr(rules, "right_window", None)
  features: dict[Feature, str] = {}
  if not rules.causal:
    features[Feature.BIDIRECTIONAL] = "causal is False"
  if window is None and chunk is None:
    features[Feature.NO_LIMIT] = "neither window nor chunk is set"
  if window is not None:
    features[Feature.WINDOW] = f"window is {window}"
  if window is not None and right_window is None and not rules.causal:
    words = f"window is {window} and causal is False"
    features[Feature.TWO_SIDED_WINDOW] = words
  if right_window is not None:
    features[Feature.RIGHT_WINDOW] = f"right_window is {right_window}"
  if chunk is not None:
    features[Feature.CHUNK] = f"chunk is {chunk}"
  return features
