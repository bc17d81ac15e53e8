"""Attention by cuDNN: one fused kernel of NVIDIA GPUs.

`cudnn` is a kernel as those of `kernels` are. cuDNN is told of a mask what it
knows: that it is causal, its window, and the length of each row. So rows with
one document each need nothing of size T x S. Of rows with several documents
JAX's public function knows nothing; for them the mask becomes a bias
[B,1,T,S], which is N times less than the logits, but grows with T x S.

Letters: B batch, T queries, S keys, N heads, K key/value heads, H head_dim.
"""

from collections.abc import Iterator
import contextlib
import contextvars
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float
import numpy as np

from paxon.layers.attention import mask as attention_mask
from paxon.sharding import axes, logical

_DTYPES: Final = ("bfloat16", "float16")
_MAX_HEAD_DIM: Final = 256
_HEADS: Final = (
  axes.BATCH,
  axes.LENGTH,
  axes.ACTIVATION_HEADS,
  axes.ACTIVATION_HEAD_DIM,
)
_KV_HEADS: Final = (
  axes.BATCH,
  axes.LENGTH,
  axes.ACTIVATION_KV_HEADS,
  axes.ACTIVATION_HEAD_DIM,
)
# Where cuDNN is not needed, because nothing is compiled for its GPUs.
_stands_in: contextvars.ContextVar[bool] = contextvars.ContextVar(
  "cudnn_stands_in", default=False
)


class CudnnMissingError(ValueError):
  """cuDNN's library is not on this machine."""


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
  """Lets XLA stand in for cuDNN, for shapes and for counts of FLOPs.

  cuDNN attention cannot even be traced without cuDNN's library.
  """
  token = _stands_in.set(True)
  try:
    yield
  finally:
    _stands_in.reset(token)


def problem(*, head_dim: int, dtype: DTypeLike) -> str | None:
  """Returns why cuDNN cannot serve a layer, or None if it can.

  Args:
    head_dim: Width of a head.
    dtype: Of queries, keys and values.
  """
  name = np.dtype(dtype).name
  if name not in _DTYPES:
    return f"its dtype is {name}, and cuDNN takes {' or '.join(_DTYPES)}"
  if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
    return (
      f"its head_dim is {head_dim}, and cuDNN takes multiples of 8 up to"
      f" {_MAX_HEAD_DIM} (128 before Hopper)"
    )
  return None


def cudnn(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch kv_length kv_heads head_dim"],
  value: Float[Array, "batch kv_length kv_heads head_dim"],
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: jax.Array | None = None,
  packed: bool = True,
  implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "batch length heads head_dim"]:
  """Attention by cuDNN; its softmax is in float32.

  Args:
    query: Queries.
    key: Keys.
    value: Values.
    mask: Which keys each query sees.
    logit_cap: Refused: cuDNN does not bend logits.
    bias: Refused: of its gradient cuDNN makes something of size T x S.
    packed: Whether rows may hold several documents. False promises that each
      row is one document with padding behind it; rows for which that is not
      true become NaN. Calls with a cache (S is not T) do not depend on it.
    implementation: "xla" computes the same, from the same description of the
      mask, on any device.

  Returns:
    The weighted values.

  Raises:
    ValueError: cuDNN cannot serve this call; the message says why.
    CudnnMissingError: cuDNN is not here.
  """
  if implementation == "cudnn":
    _check(query, logit_cap, bias)
  if _stands_in.get():
    implementation = "xla"
  if query.shape[2] % key.shape[2]:
    raise ValueError(
      f"The heads of queries ({query.shape[2]}) must be a multiple of those of"
      f" keys ({key.shape[2]})."
    )
  is_described = not packed and query.shape[1] == key.shape[1]
  if is_described and mask.window is not None and not mask.causal:
    raise ValueError(
      "cuDNN attention has windows for causal masks only; use kernels.fused."
    )

  def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: attention_mask.AttentionMask,
  ) -> jax.Array:
    settings = _described(mask) if is_described else {"mask": mask.to_array()}
    # JAX's own code mixes bfloat16 with float32, an error under strict
    # promotion.
    with jax.numpy_dtype_promotion("standard"):
      out = jax.nn.dot_product_attention(
        query, key, value, implementation=implementation, **settings
      )
    if is_described:
      sees_any = mask.q_segment_ids != 0
      broken = jnp.where(_is_one_document(mask), 0.0, jnp.nan)
      out += broken.astype(out.dtype)[:, None, None, None]
    else:
      sees_any = jnp.any(settings["mask"], axis=-1)[:, 0]
    zero = jnp.zeros((), out.dtype)
    return jnp.where(sees_any[:, :, None, None], out, zero)

  try:
    return _on_each_device(attend, query, key, value, mask)
  except NotImplementedError as error:
    raise ValueError(f"cuDNN attention cannot serve this call: {error}") from (
      error
    )
  except RuntimeError as error:
    if "cuDNN" not in str(error):
      raise
    raise CudnnMissingError(
      f"cuDNN attention needs NVIDIA's library, and JAX says: {error} Where"
      " there is no NVIDIA GPU, use kernels.fused."
    ) from error


def one_document(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch kv_length kv_heads head_dim"],
  value: Float[Array, "batch kv_length kv_heads head_dim"],
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: jax.Array | None = None,
) -> Float[Array, "batch length heads head_dim"]:
  """`cudnn` for rows of one document each: what is masked is not computed.

  A function, so that a command line can name it.

  Args:
    query: Queries.
    key: Keys.
    value: Values.
    mask: Which keys each query sees; rows that are not one document with
      padding behind it become NaN.
    logit_cap: Refused, as by `cudnn`.
    bias: Refused, as by `cudnn`.

  Returns:
    The weighted values.
  """
  return cudnn(
    query, key, value, mask, logit_cap=logit_cap, bias=bias, packed=False
  )


def _check(
  query: jax.Array, logit_cap: float | None, bias: jax.Array | None
) -> None:
  if logit_cap is not None:
    raise ValueError(
      f"cuDNN attention cannot cap logits (logit_cap is {logit_cap}); use"
      " kernels.plain."
    )
  if bias is not None:
    raise ValueError(
      f"cuDNN attention takes no bias here, got one of shape {bias.shape}; use"
      " kernels.fused."
    )
  found = problem(head_dim=query.shape[-1], dtype=query.dtype)
  if found is not None:
    raise ValueError(f"cuDNN attention cannot serve this layer: {found}.")


def _described(mask: attention_mask.AttentionMask) -> dict[str, Any]:
  """Returns the mask in the words of `jax.nn.dot_product_attention`."""
  lengths = jnp.sum(mask.q_segment_ids != 0, axis=-1, dtype=jnp.int32)
  settings: dict[str, Any] = {
    "is_causal": mask.causal,
    "query_seq_lengths": lengths,
    "key_value_seq_lengths": lengths,
  }
  if mask.window is not None:
    # JAX does not count the query's own position.
    settings["local_window_size"] = (mask.window - 1, 0)
  return settings


def _is_one_document(
  mask: attention_mask.AttentionMask,
) -> Bool[Array, " batch"]:
  """Whether each row is one document, in order, with padding behind it."""
  ids, positions = mask.q_segment_ids, mask.q_positions
  index = jnp.arange(ids.shape[-1], dtype=positions.dtype)[None]
  lengths = jnp.sum(ids != 0, axis=-1, keepdims=True, dtype=positions.dtype)
  inside = index < lengths
  expected = jnp.where(inside, ids[:, :1], 0)
  in_order = (positions - positions[:, :1] == index) | ~inside
  return jnp.all((ids == expected) & in_order, axis=-1)


def _on_each_device(
  attend: Any,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: attention_mask.AttentionMask,
) -> jax.Array:
  """Calls `attend` for each device's rows and heads.

  Left to the partitioner, the kernel would be a call that cannot be serialized
  and that fails on heads that do not divide.
  """
  heads = _real_splits(logical.partition_spec(query.shape, _HEADS))
  kv_heads = _real_splits(logical.partition_spec(key.shape, _KV_HEADS))
  if heads is None or kv_heads is None:
    return attend(query, key, value, mask)
  if heads[1] is not None or kv_heads[1] is not None:
    raise ValueError(
      "cuDNN attention needs whole rows on each device, but the mesh splits"
      f" '{axes.LENGTH}' over {_words(heads[1] or kv_heads[1])}."
    )
  if heads[2] != kv_heads[2] and key.shape[2] > 1:
    raise ValueError(
      "cuDNN attention needs heads of queries and of keys on the same devices,"
      f" but the mesh splits them over {_words(heads[2])} and over"
      f" {_words(kv_heads[2])}."
    )
  rows = jax.P(heads[0])
  mapped = jax.shard_map(
    attend,
    in_specs=(heads, kv_heads, kv_heads, rows),
    out_specs=heads,
  )
  return mapped(query, key, value, mask)


def _real_splits(
  spec: jax.sharding.PartitionSpec | None,
) -> jax.sharding.PartitionSpec | None:
  """Returns the spec without mesh axes of size one."""
  if spec is None:
    return None
  sizes = jax.sharding.get_abstract_mesh().shape
  entries: list[tuple[str, ...] | None] = []
  for entry in spec:
    names = (entry,) if isinstance(entry, str) else entry or ()
    entries.append(tuple(name for name in names if sizes[name] > 1) or None)
  return jax.P(*entries)


def _words(entry: Any) -> str:
  return ", ".join(
    (entry,) if isinstance(entry, str) else entry or ("nothing",)
  )
