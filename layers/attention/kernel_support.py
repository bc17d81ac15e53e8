"""What each attention kernel serves, as data, and the one check of it.

A kernel is declared once, below, and refers to its declaration by `declared`,
or by an attribute `support`. Its calls are checked against it, and so is
a configuration before anything is traced. Kernels of other repositories may
declare themselves likewise; one without a declaration is taken as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import enum
import functools
from typing import Any, Final, TypeVar

import jax
from jax.typing import DTypeLike
import numpy as np

from paxon.layers.attention import mask as attention_mask

CUDA: Final = "cuda"
TPU: Final = "tpu"


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
  features = _of_mask(mask.rules)
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
  rules = getattr(layer, "mask", None)
  features = {} if rules is None else _of_mask(rules)
  logits = getattr(layer, "logits", None)
  cap = getattr(logits, "cap", None)
  if cap is not None:
    features[Feature.LOGIT_CAP] = f"logits.cap is {cap}"
  for field in ("position_bias", "relative_position"):
    part = getattr(logits, field, None)
    if part is not None:
      features[Feature.BIAS] = f"logits.{field} is {type(part).__name__}"
  sinks = getattr(logits, "sinks", None)
  if sinks is not None:
    features[Feature.SINKS] = f"logits.sinks is {type(sinks).__name__}"
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


_Feature = Feature


@dataclasses.dataclass(frozen=True, kw_only=True)
class Support:
  """What a kernel serves.

  Attributes:
    name: How it is called in a configuration.
    refused: Why it cannot serve a feature, for each that it cannot.
    dtypes: Names of the dtypes that it takes; empty for all.
    platforms: Where it runs; empty for everywhere.
    head_dim_multiple: What the width of a head must be a multiple of.
    max_head_dim: The largest width of a head; None for any.
  """

  name: str
  refused: Mapping[Feature, str] = dataclasses.field(default_factory=dict)
  dtypes: tuple[str, ...] = ()
  platforms: tuple[str, ...] = ()
  head_dim_multiple: int = 1
  max_head_dim: int | None = None

  def without(self, *features: Feature) -> "Support":
    """Returns it without refusals of some features."""
    kept = {f: why for f, why in self.refused.items() if f not in features}
    return dataclasses.replace(self, refused=kept)

  def problems(self, request: Request) -> Iterator[str]:
    """Yields each reason why a request cannot be served."""
    if self.platforms and request.platform not in (None, *self.platforms):
      yield f"it runs on {_either(self.platforms)}, not on {request.platform}"
    if self.dtypes and request.dtype not in (None, *self.dtypes):
      yield (
        f"its dtype is {request.dtype}, and the kernel takes"
        f" {_either(self.dtypes)}"
      )
    head_dim = request.head_dim
    if head_dim is not None and not self._takes_width(head_dim):
      most = "" if self.max_head_dim is None else f" up to {self.max_head_dim}"
      yield (
        f"its head_dim is {head_dim}, and the kernel takes multiples of"
        f" {self.head_dim_multiple}{most}"
      )
    for feature, words in request.features.items():
      if feature in self.refused:
        yield f"{words}, but {self.refused[feature]}"

  def _takes_width(self, head_dim: int) -> bool:
    most = self.max_head_dim
    fits = most is None or head_dim <= most
    return fits and head_dim % self.head_dim_multiple == 0


PLAIN: Final = Support(name="layers.attention.kernels.plain")

_OF_JAX: Final[Mapping[Feature, str]] = {
  _Feature.LOGIT_CAP: "jax.nn.dot_product_attention has no cap",
  _Feature.SINKS: "jax.nn.dot_product_attention has no sinks",
  _Feature.VALUE_WIDTH: "jax.nn.dot_product_attention wants one width",
}

FUSED: Final = Support(name="layers.attention.kernels.fused", refused=_OF_JAX)

_OF_CUDNN: Final[Mapping[Feature, str]] = {
  **_OF_JAX,
  _Feature.BIAS: "of its gradient cuDNN makes something of size T x S",
  _Feature.SPLIT_ROWS: "cuDNN needs whole rows on each device",
}

CUDNN: Final = Support(
  name="layers.attention.cudnn_attention.cudnn",
  refused=_OF_CUDNN,
  dtypes=("bfloat16", "float16"),
  platforms=(CUDA,),
  head_dim_multiple=8,
  # 128 before Hopper, which JAX itself refuses.
  max_head_dim=256,
)

CUDNN_ONE_DOCUMENT: Final = dataclasses.replace(
  CUDNN,
  name="layers.attention.cudnn_attention.one_document",
  refused={
    **_OF_CUDNN,
    _Feature.TWO_SIDED_WINDOW: "cuDNN has windows for causal masks only",
    _Feature.RIGHT_WINDOW: "cuDNN has windows for causal masks only",
    _Feature.CHUNK: "cuDNN knows no chunks",
    _Feature.PREFIX: "cuDNN knows no prefix",
    _Feature.PACKED: "it is a promise that each row is one document",
  },
)

SPLASH: Final = Support(
  name="layers.attention.splash.Splash",
  refused={
    _Feature.BIAS: "splash attention has no bias",
    _Feature.PREFIX: "what splash attention hides is fixed when compiled",
    _Feature.CACHE: (
      "splash attention goes by places in a row, and a cache has others (set"
      " with_cache to a kernel for such calls)"
    ),
    _Feature.SPLIT_ROWS: "splash attention needs whole rows on each device",
  },
  dtypes=("bfloat16", "float32"),
  platforms=(TPU,),
)

RING: Final = Support(
  name="layers.attention.ring.Ring",
  refused={
    _Feature.BIAS: "a bias of all pairs is what a ring is there to avoid"
  },
)

LOCAL_BLOCKS: Final = Support(
  name="layers.attention.local_blocks.LocalBlocks",
  refused={
    _Feature.NO_LIMIT: "blocks need a mask with a limit",
    _Feature.BIAS_MATRIX: "blocks take a bias as a function of positions",
  },
)

QUERY_CHUNKS: Final = Support(name="layers.attention.query_chunks.QueryChunks")

# The limits of cuDNN, but a bias, which it turns into a gradient of its size.
FUSED_BY_CUDNN: Final = dataclasses.replace(
  CUDNN, name=FUSED.name, refused=_OF_JAX
)

# Those that a message may propose.
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


def declared(
  support: Support | Callable[[Mapping[str, Any]], Support],
) -> Callable[[_F], _F]:
  """Returns a decorator that gives a kernel its declaration.

  Args:
    support: The declaration; or a function of the settings that a
      `functools.partial` of the kernel has, where it depends on them.
  """

  def declare(kernel: _F) -> _F:
    setattr(kernel, _ATTRIBUTE, support)
    return kernel

  return declare


_ATTRIBUTE: Final = "support"


def of(kernel: Any) -> Support | None:
  """Returns the declaration of a kernel, or None if it has none.

  Args:
    kernel: A function, a `functools.partial` of one, or an object with an
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


def around(support: Support, kernel: Any) -> Support:
  """Returns what a kernel serves that calls another one for parts of a row.

  Args:
    support: What it would serve with a kernel that serves everything.
    kernel: The other one; a cache and a split row are not its concern.
  """
  inner = of(kernel)
  if inner is None:
    return support
  inner = inner.without(_Feature.CACHE, _Feature.SPLIT_ROWS)
  return dataclasses.replace(
    inner, name=support.name, refused={**inner.refused, **support.refused}
  )


def supports(kernel: Any, request: Request) -> list[str]:
  """Returns why a kernel cannot serve a request; nothing if it can.

  Args:
    kernel: As for `of`.
    request: What is asked for.
  """
  support = of(kernel)
  return [] if support is None else list(support.problems(request))


def refusal(support: Support, request: Request) -> str | None:
  """Returns one sentence about why a kernel cannot serve a request.

  Args:
    support: Of the kernel.
    request: What is asked for.

  Returns:
    The kernel, each reason, and the kernels that can; None if it can.
  """
  problems = list(support.problems(request))
  if not problems:
    return None
  # Not empty: `plain` serves everything.
  able = [k.name for k in KERNELS if not any(k.problems(request))]
  return (
    f"{support.name} cannot serve this layer: {'; '.join(problems)}; use"
    f" {_either(able)}."
  )


def check(support: Support, request: Request) -> None:
  """Checks that a kernel can serve a request.

  Args:
    support: Of the kernel.
    request: What is asked for.

  Raises:
    ValueError: It cannot; see `refusal`.
  """
  message = refusal(support, request)
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
  """Checks that a kernel can serve a call, by its arguments.

  Args:
    support: Of the kernel.
    query: Queries [B,T,N,H].
    key: Keys [B,S,K,H].
    value: Values [B,S,K,H'].
    mask: Which keys each query sees.
    logit_cap: As kernels take it.
    bias: As kernels take it, or a function that makes it.
    sinks: As kernels take it.

  Raises:
    ValueError: It cannot, or the heads do not divide into groups.
  """
  request = of_call(
    query, key, value, mask, logit_cap=logit_cap, bias=bias, sinks=sinks
  )
  check(support, request)
  heads, kv_heads = query.shape[2], key.shape[2]
  if heads % kv_heads:
    raise ValueError(
      f"The heads of queries ({heads}) must be a multiple of those of keys "
      f"({kv_heads})."
    )


def _either(words: Sequence[str]) -> str:
  *most, last = words
  return f"{', '.join(most)} or {last}" if most else last


def _of_mask(rules: attention_mask.MaskRules) -> dict[Feature, str]:
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
