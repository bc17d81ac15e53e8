"""Attention by cuDNN: one fused kernel of NVIDIA GPUs.

cuDNN supports causal masks, windows and the length of each sequence, so
sequences of one document each need nothing of size T x S. JAX's public function
does not support several documents per sequence; for them the mask becomes a
bias [B,1,T,S], which is N times smaller than the logits, but grows with T x S.
Causal self-attention passes both: cuDNN skips the blocks above the diagonal,
and the bias masks other documents.

Letters: B batch, T queries, S keys, N heads, K key/value heads, H head_dim.
"""

from collections.abc import Iterator, Mapping
import contextlib
import contextvars
import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float
import numpy as np

from paxon.layers.attention import kernel_support, per_device
from paxon.layers.attention import mask as attention_mask

# Set where nothing is compiled for GPUs, so that cuDNN is not needed.
_stands_in: contextvars.ContextVar[bool] = contextvars.ContextVar(
  "cudnn_stands_in", default=False
)


class CudnnMissingError(ValueError):
  """The cuDNN library is missing on this machine."""


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
  """Replaces cuDNN by XLA, to trace shapes and count FLOPs.

  cuDNN attention cannot even be traced without cuDNN's library.
  """
  token = _stands_in.set(True)
  try:
    yield
  finally:
    _stands_in.reset(token)


def problem(*, head_dim: int, dtype: DTypeLike) -> str | None:
  """Returns why cuDNN does not support a layer, or None if it does."""
  request = kernel_support.Request(
    head_dim=head_dim, dtype=np.dtype(dtype).name
  )
  return next(kernel_support.CUDNN.problems(request), None)


def _support(settings: Mapping[str, Any]) -> kernel_support.Support:
  support = (
    kernel_support.CUDNN
    if settings.get("packed", True)
    else kernel_support.CUDNN_ONE_DOCUMENT
  )
  if settings.get("implementation", "cudnn") == "cudnn":
    return support
  return dataclasses.replace(
    support, dtypes=(), platforms=(), head_dim_multiple=1, max_head_dim=None
  )


@kernel_support.declare(_support)
def cudnn(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch kv_length kv_heads head_dim"],
  value: Float[Array, "batch kv_length kv_heads head_dim"],
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: jax.Array | None = None,
  scale: float | None = None,
  sinks: jax.Array | None = None,
  packed: bool = True,
  implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "batch length heads head_dim"]:
  """Attention by cuDNN, called like `kernels.plain`; its softmax is in float32.

  Soft caps, sinks and a bias (cuDNN materializes its T x S gradient) are not
  supported. cuDNN applies causality by the index of a token, so self-attention
  that is causal requires documents one after another, with rising ids and
  positions in order (`mask.is_in_order`); other sequences become NaN.
  `packed=False` also requires that each is one document followed by padding.
  Calls with a cache take any mask. `implementation="xla"` computes the same on
  any device.

  Raises:
    ValueError: cuDNN does not support this call.
    CudnnMissingError: The cuDNN library is missing.
  """
  is_described = not packed and query.shape[1] == key.shape[1]
  # A prefix and keys of a cache may be after their query.
  is_ordered = mask.is_self and mask.reach[1] == 0
  settings = {"packed": not is_described, "implementation": implementation}
  kernel_support.check_call(
    _support(settings),
    query,
    key,
    value,
    mask,
    logit_cap=logit_cap,
    bias=bias,
    sinks=sinks,
  )
  if _stands_in.get():
    implementation = "xla"

  def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: attention_mask.AttentionMask,
    sinks: None,
  ) -> jax.Array:
    settings, is_right = _make_settings(
      mask, is_described=is_described, is_ordered=is_ordered
    )
    # JAX's own code mixes bfloat16 with float32, an error under strict
    # promotion.
    with jax.numpy_dtype_promotion("standard"):
      out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        implementation=implementation,
        **settings,
      )
    return _mask_output(out, mask, settings, is_right)

  with _explain_errors():
    return per_device.call(attend, query, key, value, mask, name="cuDNN")


@contextlib.contextmanager
def _explain_errors() -> Iterator[None]:
  """Turns errors of JAX about cuDNN into those that `cudnn` documents."""
  try:
    yield
  except NotImplementedError as error:
    raise ValueError(
      f"cuDNN attention does not support this call: {error}"
    ) from (error)
  except RuntimeError as error:
    if "cuDNN" not in str(error):
      raise
    raise CudnnMissingError(
      f"cuDNN attention needs NVIDIA's library; JAX reports: {error} Without an"
      " NVIDIA GPU, use kernels.fused."
    ) from error


@kernel_support.declare(kernel_support.CUDNN_ONE_DOCUMENT)
def one_document(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch kv_length kv_heads head_dim"],
  value: Float[Array, "batch kv_length kv_heads head_dim"],
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: jax.Array | None = None,
  scale: float | None = None,
  sinks: jax.Array | None = None,
) -> Float[Array, "batch length heads head_dim"]:
  """`cudnn(..., packed=False)`: masked keys are not computed.

  A function, so that a command line can name it.
  """
  return cudnn(
    query,
    key,
    value,
    mask,
    logit_cap=logit_cap,
    bias=bias,
    scale=scale,
    sinks=sinks,
    packed=False,
  )


def _make_settings(
  mask: attention_mask.AttentionMask, *, is_described: bool, is_ordered: bool
) -> tuple[dict[str, Any], Bool[Array, " batch"] | None]:
  """Returns the mask as arguments of `jax.nn.dot_product_attention`.

  Also returns which sequences meet the requirements of these arguments; None if
  there are none.

  Args:
    mask: The mask.
    is_described: Whether lengths describe it, without an array [B,1,T,S].
    is_ordered: Whether cuDNN applies causality by index.
  """
  if is_described:
    return _describe(mask), _is_one_document(mask)
  settings: dict[str, Any] = {"mask": mask.to_array()}
  if not is_ordered:
    return settings, None
  settings |= _find_index_mask(mask)
  return settings, attention_mask.is_in_order(mask)


def _mask_output(
  out: jax.Array,
  mask: attention_mask.AttentionMask,
  settings: Mapping[str, Any],
  is_right: jax.Array | None,
) -> jax.Array:
  """Returns the output, zero where queries attend to nothing.

  Sequences that do not meet the requirements of `settings` become NaN.
  """
  if is_right is None:
    sees_any = mask.sees_any(settings["mask"])
  else:
    sees_any = mask.q_segment_ids != 0
    broken = jnp.where(is_right, 0.0, jnp.nan)
    out += broken.astype(out.dtype)[:, None, None, None]
  zero = jnp.zeros((), out.dtype)
  return jnp.where(sees_any[:, :, None, None], out, zero)


def _describe(mask: attention_mask.AttentionMask) -> dict[str, Any]:
  """Returns the mask as arguments of `jax.nn.dot_product_attention`."""
  lengths = jnp.sum(mask.q_segment_ids != 0, axis=-1, dtype=jnp.int32)
  settings = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
  return settings | (_find_index_mask(mask) if mask.rules.causal else {})


def _find_index_mask(mask: attention_mask.AttentionMask) -> dict[str, Any]:
  """Returns causality and a window, which cuDNN applies by index."""
  if mask.rules.window is None:
    return {"is_causal": True}
  # JAX does not count the query's own position.
  return {
    "is_causal": True,
    "local_window_size": (mask.rules.window - 1, 0),
  }


def _is_one_document(
  mask: attention_mask.AttentionMask,
) -> Bool[Array, " batch"]:
  """Returns which sequences are one document, in order, then padding."""
  ids, positions = mask.q_segment_ids, mask.q_positions
  index = jnp.arange(ids.shape[-1], dtype=positions.dtype)[None]
  lengths = jnp.sum(ids != 0, axis=-1, keepdims=True, dtype=positions.dtype)
  inside = index < lengths
  expected = jnp.where(inside, ids[:, :1], 0)
  in_order = (positions - positions[:, :1] == index) | ~inside
  return jnp.all((ids == expected) & in_order, axis=-1)
