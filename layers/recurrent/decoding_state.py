"""Decoding state of recurrent layers, their counterpart of a cache.

A recurrent layer keeps a few arrays for each sequence, whatever its length, as
variables of the collection `cache`. It is called like attention:

  * no collection and no `cache_length` (training): nothing is stored;
  * `cache_length` given (prefill): the state after the tokens is stored;
  * the collection exists (decoding): the tokens continue from it.

Packed documents are separate: a `run` is a maximal sequence of tokens of one
segment, and the state is reset where a run begins. Padding (segment 0) is
passed over; it may be before, between and after runs. With the state, the
segment of the last token is stored, so that run 0 continues the stored one.

Letters: B batch, T length.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers import token_context
from paxon.layers.attention import cache_variables
from paxon.sharding import axes, variables

_SEGMENT = "segment"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
  """The tokens of a call.

  Attributes:
    is_real: Bool [B,T]; False for padding.
    runs: Int [B,T]; number of runs that have begun in this call, 0 for tokens
      that continue from the stored state. Padding has that of the token before.
    last_segment: Int [B]; segment of the last token, 0 if there is none.
    is_plain: Whether all tokens are real and of one run, which begins with a
      state of zeros; known when the program is traced, so masks are left out.
  """

  is_real: jax.Array
  runs: jax.Array
  last_segment: jax.Array
  is_plain: bool = dataclasses.field(default=False, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Shape:
  """One stored array: its shape without B, dtype and logical axes.

  Attributes:
    sizes: Shape of one sequence.
    dtype: Stored dtype.
    names: Logical axes of `sizes`.
  """

  sizes: tuple[int, ...]
  dtype: Any
  names: tuple[str | None, ...]


def begin(
  layer: nn.Module,
  x: jax.Array,
  context: token_context.TokenContext,
  shapes: Mapping[str, Shape],
) -> tuple[Tokens, dict[str, jax.Array] | None]:
  """Returns the tokens of a call and the stored arrays by name.

  The arrays are zeros in a prefill, and `None` where nothing is stored.

  Args:
    layer: The bound layer that was called.
    x: Its input [B,T,D].
    context: Segments of the tokens. Positions are not used; there must be no
      prefix, because no token can read later ones; and a state takes any
      number of tokens, whatever the `cache_length`.
    shapes: The arrays that the layer stores.

  Raises:
    TypeError: Segments are not integers.
    ValueError: Shapes do not fit, a prefill is given a state, or there is a
      prefix.
  """
  if context.prefix is not None:
    raise ValueError(
      f"{type(layer).__name__} got a prefix, whose tokens would read later"
      " ones; a recurrent layer reads each token after those before it."
    )
  is_plain, cache_length = context.segment_ids is None, context.cache_length
  segment_ids = token_context.fill_segments(layer, x, context.segment_ids)
  batch = x.shape[0]
  is_filled = layer.has_variable(cache_variables.COLLECTION, _SEGMENT)
  if cache_length is None and not is_filled:
    tokens = _find_runs(segment_ids, jnp.zeros((batch,), segment_ids.dtype))
    return dataclasses.replace(tokens, is_plain=is_plain), None
  if not is_filled:
    zeros = {
      name: jnp.zeros((batch, *shape.sizes), shape.dtype)
      for name, shape in shapes.items()
    }
    return _find_runs(segment_ids, jnp.zeros((batch,), jnp.int32)), zeros
  if cache_length is not None:
    raise ValueError(
      "cache_length was given, but a state exists already; leave out the"
      f" collection {cache_variables.COLLECTION!r} to start a new one, or"
      " cache_length to continue from it."
    )
  stored = dict(variables.unbox(layer.variables[cache_variables.COLLECTION]))
  last = stored[_SEGMENT]
  if last.shape[0] != batch:
    raise ValueError(
      f"A batch of {batch} sequences does not fit a state of {last.shape[0]};"
      " layers.decoding.cache_rows repeats or selects its sequences."
    )
  arrays = {name: stored[name] for name in shapes}
  for name, shape in shapes.items():
    found = arrays[name]
    if found.shape[1:] != shape.sizes or found.dtype != jnp.dtype(shape.dtype):
      raise ValueError(
        f"The state {name!r} is {found.dtype.name}{list(found.shape[1:])}, but"
        f" the layer needs {jnp.dtype(shape.dtype).name}{list(shape.sizes)};"
        " decode with the layer and dtype that made the state."
      )
  return _find_runs(segment_ids, last), arrays


def store(
  layer: nn.Module,
  tokens: Tokens,
  arrays: Mapping[str, jax.Array],
  shapes: Mapping[str, Shape],
) -> None:
  """Makes or replaces the stored arrays of a layer."""
  names = {name: shape.names for name, shape in shapes.items()}
  last = tokens.last_segment.astype(jnp.int32)
  for name, x in {**arrays, _SEGMENT: last}.items():
    init: Any = variables.make_boxed_init(
      nn.initializers.zeros,
      (axes.BATCH, *names.get(name, ())),
      shape=x.shape,
      dtype=x.dtype,
    )
    # Linen unboxes on reading, and keeps the box on writing.
    layer.variable(cache_variables.COLLECTION, name, init).value = x


def _find_runs(segment_ids: jax.Array, last: jax.Array) -> Tokens:
  """Returns the tokens of segments [B,T] after those of a segment [B]."""
  is_real = segment_ids != 0
  # The segment of the latest token up to each one, that before the call first.
  index = jnp.arange(1, segment_ids.shape[1] + 1, dtype=jnp.int32)[None]
  latest = jax.lax.cummax(jnp.where(is_real, index, 0), axis=1)
  every = jnp.concatenate(
    [last[:, None].astype(segment_ids.dtype), segment_ids], axis=1
  )
  current = jnp.take_along_axis(every, latest, axis=1)
  before = jnp.concatenate([every[:, :1], current[:, :-1]], axis=1)
  runs = jnp.cumsum(is_real & (current != before), axis=1, dtype=jnp.int32)
  return Tokens(is_real=is_real, runs=runs, last_segment=current[:, -1])
