"""Features that attention kernels support, and the check of calls and layers.

A kernel declares its `Support` by the decorator `declare` or an attribute
`support`. A `Request` lists the required features, of a call or of a layer
before anything is traced. Kernels of other repositories may declare theirs; a
kernel without a declaration is not checked.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import enum
import functools
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import jax
from jax.typing import DTypeLike
import numpy as np

from paxon.layers.attention import mask as attention_mask
from paxon.sharding import target


class Feature(enum.Enum):
  """A feature that not every kernel supports."""

  LOGIT_CAP = "soft-capped logits"
  BIAS = "a bias of logits"
  BIAS_MATRIX = "a bias matrix"
  SINKS = "attention sinks"
  PREFIX = "a bidirectional prefix"
  CHUNK = "chunks"
  WINDOW = "a window"
  RIGHT_WINDOW = "a window to the right"
  TWO_SIDED_WINDOW = "a window to both sides"
  NO_LIMIT = "no window or chunk"
  BIDIRECTIONAL = "later keys"
  CACHE = "a cache"
  VALUE_WIDTH = "values of another width than keys"
  PACKED = "several documents per sequence"
  SPLIT_SEQUENCES = "sequences split over devices"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(target.Request):
  """Requirements of a call or a layer; unknown ones are None or missing.

  Attributes:
    head_dim: Width of a head, of queries and keys.
    features: Required features, each with the reason, such as
      `logit_cap is 30.0`.
  """

  head_dim: int | None = None
  features: Mapping[Feature, str] = dataclasses.field(default_factory=dict)

  def asking(self, feature: Feature, words: str) -> "Request":
    """Returns a copy with one more feature."""
    return dataclasses.replace(self, features={**self.features, feature: words})


def from_call(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: Any | None = None,
  sinks: jax.Array | None = None,
) -> Request:
  """Returns the requirements of a call, by the arguments of the kernel.

  Packing is in the data, and the platform is decided later; both are unknown.
  A bias may be a function that returns it.
  """
  features = _find_mask_features(mask.rules)
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
  if query.shape[1] != key.shape[1] and mask.by_position:
    features[Feature.CACHE] = (
      f"{query.shape[1]} queries attend to {key.shape[1]} keys by position"
    )
  return Request(
    head_dim=query.shape[-1],
    dtype=np.dtype(query.dtype).name,
    features=features,
  )


class _Settings(Protocol):
  cap: float | None
  position_bias: object
  relative_position: object
  sinks: object


@runtime_checkable
class HasHeads(Protocol):
  """An attention layer."""

  head_dim: int | None
  dtype: DTypeLike | None


@runtime_checkable
class HasMask(Protocol):
  """An attention layer with rules of its mask."""

  mask: attention_mask.MaskRules


@runtime_checkable
class HasLogits(Protocol):
  """An attention layer with settings of its logits (`kernels.Logits`)."""

  logits: _Settings


@runtime_checkable
class HasRotaryPart(Protocol):
  """A layer of which `head_dim` is only the part that is not rotated."""

  rope_dim: int


@runtime_checkable
class HasValueWidth(Protocol):
  """A layer whose values may be of another width than keys."""

  value_dim: int


def from_layer(layer: Any, *, dtype: DTypeLike | None = None) -> Request:
  """Returns the requirements of an attention layer.

  Fields of the protocols above are read; `dtype` is that of queries, keys and
  values if the layer has none.
  """
  features: dict[Feature, str] = {}
  if isinstance(layer, HasMask):
    features |= _find_mask_features(layer.mask)
  if isinstance(layer, HasLogits):
    logits = layer.logits
    if logits.cap is not None:
      features[Feature.LOGIT_CAP] = f"logits.cap is {logits.cap}"
    for field, part in (
      ("position_bias", logits.position_bias),
      ("relative_position", logits.relative_position),
    ):
      if part is not None:
        features[Feature.BIAS] = f"logits.{field} is {type(part).__name__}"
    if logits.sinks is not None:
      words = f"logits.sinks is {type(logits.sinks).__name__}"
      features[Feature.SINKS] = words
  head_dim = None
  if isinstance(layer, HasHeads):
    head_dim, dtype = layer.head_dim, layer.dtype or dtype
  if head_dim is not None and isinstance(layer, HasRotaryPart):
    head_dim += layer.rope_dim
  value_dim = layer.value_dim if isinstance(layer, HasValueWidth) else head_dim
  if None not in (head_dim, value_dim) and value_dim != head_dim:
    words = f"values are {value_dim} wide and keys {head_dim}"
    features[Feature.VALUE_WIDTH] = words
  return Request(
    head_dim=head_dim,
    dtype=None if dtype is None else np.dtype(dtype).name,
    features=features,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Support(target.Support):
  """The features, dtypes, platforms and widths that a kernel supports.

  Attributes:
    unsupported: The reason for each feature that it does not support.
    head_dim_multiple: Divisor of supported head widths.
    max_head_dim: Largest head width; None for any.
    wide_keys: Whether keys and values may have a wider dtype than queries.
  """

  unsupported: Mapping[Feature, str] = dataclasses.field(default_factory=dict)
  head_dim_multiple: int = 1
  max_head_dim: int | None = None
  wide_keys: bool = False

  def without(self, *features: Feature) -> "Support":
    """Returns a copy that supports some more features."""
    kept = {f: why for f, why in self.unsupported.items() if f not in features}
    return dataclasses.replace(self, unsupported=kept)

  def problems(self, request: Request) -> Iterator[str]:
    """Yields each reason why a request is not supported."""
    yield from super().problems(request)
    head_dim, most = request.head_dim, self.max_head_dim
    if head_dim is not None and (
      head_dim % self.head_dim_multiple
      or (most is not None and head_dim > most)
    ):
      yield (
        f"its head_dim is {head_dim}, and the kernel takes multiples of"
        f" {self.head_dim_multiple}{'' if most is None else f' up to {most}'}"
      )
    for feature, words in request.features.items():
      if feature in self.unsupported:
        yield f"{words}, but {self.unsupported[feature]}"


PLAIN: Final = Support(name="layers.attention.kernels.plain")
AUTO: Final = Support(name="layers.attention.kernels.auto", wide_keys=True)

_JAX_UNSUPPORTED: Final[Mapping[Feature, str]] = {
  Feature.LOGIT_CAP: "jax.nn.dot_product_attention has no soft cap",
  Feature.SINKS: "jax.nn.dot_product_attention has no sinks",
  Feature.VALUE_WIDTH: "jax.nn.dot_product_attention needs one width",
}

FUSED: Final = Support(
  name="layers.attention.kernels.fused", unsupported=_JAX_UNSUPPORTED
)

_OF_CUDNN: Final[Mapping[Feature, str]] = {
  **_JAX_UNSUPPORTED,
  Feature.BIAS: "cuDNN materializes a T x S bias gradient",
  Feature.SPLIT_SEQUENCES: "cuDNN needs whole sequences on each device",
}

CUDNN: Final = Support(
  name="layers.attention.cudnn_attention.cudnn",
  unsupported=_OF_CUDNN,
  dtypes=("bfloat16", "float16"),
  platforms=(target.CUDA,),
  head_dim_multiple=8,
  # 128 before Hopper, which JAX itself rejects.
  max_head_dim=256,
)

CUDNN_ONE_DOCUMENT: Final = dataclasses.replace(
  CUDNN,
  name="layers.attention.cudnn_attention.one_document",
  unsupported={
    **_OF_CUDNN,
    Feature.TWO_SIDED_WINDOW: "cuDNN has windows for causal masks only",
    Feature.RIGHT_WINDOW: "cuDNN has windows for causal masks only",
    Feature.CHUNK: "cuDNN has no chunks",
    Feature.PREFIX: "cuDNN has no prefix masks",
    Feature.PACKED: "one_document needs one document per sequence",
  },
)

SPLASH: Final = Support(
  name="layers.attention.splash.Splash",
  unsupported={
    Feature.BIAS: "splash attention has no bias",
    Feature.PREFIX: "splash masks are fixed at compile time",
    Feature.CACHE: (
      "splash attention masks by index, not by position (set with_cache to a"
      " kernel for calls with a cache)"
    ),
    Feature.SPLIT_SEQUENCES: (
      "splash attention needs whole sequences on each device"
    ),
  },
  dtypes=("bfloat16", "float32"),
  platforms=(target.TPU,),
)

RING: Final = Support(
  name="layers.attention.ring.Ring",
  unsupported={Feature.BIAS: "ring attention never materializes a T x S bias"},
)

LOCAL_BLOCKS: Final = Support(
  name="layers.attention.local_blocks.LocalBlocks",
  unsupported={
    Feature.NO_LIMIT: "blocks need a window or chunk",
    Feature.BIAS_MATRIX: "blocks take a bias as a function of positions",
  },
)

# The forms of `kernels.auto` on one CPU.
CAUSAL_BLOCKS: Final = Support(
  name="layers.cpu.causal_blocks",
  unsupported={
    Feature.BIDIRECTIONAL: "its blocks are causal",
    Feature.PREFIX: "its blocks are causal",
    Feature.BIAS: "its backward pass has no gradient of a bias",
    Feature.SINKS: "its backward pass has no gradient of sinks",
    Feature.CACHE: "it needs queries and keys of the same tokens",
    Feature.SPLIT_SEQUENCES: "it needs whole sequences on each device",
  },
  platforms=(target.CPU,),
)

ONE_PASS: Final = Support(
  name="layers.cpu.one_pass",
  unsupported={
    Feature.LOGIT_CAP: "its backward pass has no slope of a cap",
    Feature.BIAS: "its backward pass has no gradient of a bias",
    Feature.SINKS: "its backward pass has no gradient of sinks",
  },
  platforms=(target.CPU,),
)

QUERY_CHUNKS: Final = Support(name="layers.attention.query_chunks.QueryChunks")

# The limits of cuDNN, but with a bias, whose gradient is as large as itself.
FUSED_BY_CUDNN: Final = dataclasses.replace(
  CUDNN, name=FUSED.name, unsupported=_JAX_UNSUPPORTED
)

# The kernels that an error proposes, in this order.
KERNELS: Final = (
  CUDNN_ONE_DOCUMENT,
  CUDNN,
  SPLASH,
  RING,
  LOCAL_BLOCKS,
  QUERY_CHUNKS,
  FUSED,
  PLAIN,
)

_F = TypeVar("_F", bound=Callable[..., Any])


def declare(
  support: Support | Callable[[Mapping[str, Any]], Support],
) -> Callable[[_F], _F]:
  """Returns a decorator that declares what a kernel supports.

  The declaration may be a function of the keywords of a `functools.partial`.
  """

  def decorate(kernel: _F) -> _F:
    setattr(kernel, _ATTRIBUTE, support)
    return kernel

  return decorate


_ATTRIBUTE: Final = "support"


def find_support(kernel: Any) -> Support | None:
  """Returns the declaration of a kernel, or None if it has none.

  A kernel is a function, a `functools.partial` of one, or an object with an
  attribute `support`.
  """
  settings: dict[str, Any] = {}
  while isinstance(kernel, functools.partial):
    settings = {**kernel.keywords, **settings}
    kernel = kernel.func
  support = getattr(kernel, _ATTRIBUTE, None)
  if support is None or isinstance(support, Support):
    return support
  return support(settings)


def combine(support: Support, kernel: Any) -> Support:
  """Returns the support of a kernel that calls another one block by block.

  Caches and split sequences do not reach the inner kernel.
  """
  inner = find_support(kernel)
  if inner is None:
    return support
  inner = inner.without(Feature.CACHE, Feature.SPLIT_SEQUENCES)
  return dataclasses.replace(
    inner,
    name=support.name,
    wide_keys=support.wide_keys,
    unsupported={**inner.unsupported, **support.unsupported},
  )


def explain(support: Support, request: Request) -> str | None:
  """Returns an error message with the kernels that do support a request.

  None if the kernel supports it.
  """
  problems = list(support.problems(request))
  if not problems:
    return None
  # Not empty: `plain` supports everything.
  able = [k.name for k in KERNELS if not any(k.problems(request))]
  return (
    f"{support.name} does not support this layer: {'; '.join(problems)}; use"
    f" {target.join_words(able)}."
  )


def check(support: Support, request: Request) -> None:
  """Raises ValueError unless a kernel supports a request; see `explain`."""
  message = explain(support, request)
  if message is not None:
    raise ValueError(message)


def check_call(
  support: Support,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: Any | None = None,
  sinks: jax.Array | None = None,
) -> None:
  """Raises ValueError unless a kernel supports a call; see `from_call`.

  Also if the query heads do not divide into groups.
  """
  request = from_call(
    query, key, value, mask, logit_cap=logit_cap, bias=bias, sinks=sinks
  )
  check(support, request)
  check_groups(query, key)


def check_groups(query: jax.Array, key: jax.Array) -> None:
  """Raises ValueError unless query heads divide into groups."""
  heads, kv_heads = query.shape[2], key.shape[2]
  if heads % kv_heads:
    raise ValueError(
      f"The number of query heads ({heads}) must be a multiple of the number "
      f"of key/value heads ({kv_heads})."
    )


def _find_mask_features(rules: attention_mask.MaskRules) -> dict[Feature, str]:
  """Returns the features of a mask."""
  features: dict[Feature, str] = {}
  if not rules.causal:
    features[Feature.BIDIRECTIONAL] = "causal is False"
  if rules.window is None and rules.chunk is None:
    features[Feature.NO_LIMIT] = "neither window nor chunk is set"
  if rules.window is not None:
    features[Feature.WINDOW] = f"window is {rules.window}"
    if rules.right_window is None and not rules.causal:
      words = f"window is {rules.window} and causal is False"
      features[Feature.TWO_SIDED_WINDOW] = words
  if rules.right_window is not None:
    features[Feature.RIGHT_WINDOW] = f"right_window is {rules.right_window}"
  if rules.chunk is not None:
    features[Feature.CHUNK] = f"chunk is {rules.chunk}"
  return features
