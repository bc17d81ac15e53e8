"""Arguments of a function that is planned: arrays, names and shardings."""

from collections.abc import Callable, Sequence
import dataclasses
import inspect
import math
import sys
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import jax.tree_util
import numpy as np

from paxon.runner import user_error

# A prefix of the tree of arguments.
Shardings: TypeAlias = Any
# Arguments with at most this many parts have a size for each.
_MAX_PARTS: Final = 8


@dataclasses.dataclass(frozen=True)
class Input:
  """An array among the arguments.

  Attributes:
    argument: Index of the argument.
    label: Path in the arguments.
    group: Argument, or the part of it, whose bytes are summed.
    shape: Shape and dtype.
    sharding: As given; None if the caller gives none.
  """

  argument: int
  label: str
  group: str
  shape: jax.ShapeDtypeStruct
  sharding: Any


def flatten(
  function: Callable[..., Any],
  arguments: Sequence[Any],
  names: Sequence[str],
  in_shardings: Shardings,
) -> tuple[list[Input], Callable[..., tuple[Any, ...]]]:
  """Returns the arrays among the arguments, and the function of them."""
  leaves, tree = jax.tree_util.tree_flatten_with_path(tuple(arguments))
  inputs, places = _find_inputs(leaves, names, arguments, in_shardings)
  values = [value for _, value in leaves]

  def flat(*arrays: jax.Array) -> tuple[Any, ...]:
    merged = list(values)
    for place, array in zip(places, arrays, strict=True):
      merged[place] = array
    rebuilt = jax.tree.unflatten(tree, merged)
    out = function(*rebuilt)
    # Modules of nnx are changed in place; without them as a result, the
    # compiler would remove the update.
    changed = (out, _find_modules(rebuilt))
    return tuple(leaf for leaf in jax.tree.leaves(changed) if _is_array(leaf))

  return inputs, flat


def _is_array(leaf: Any) -> bool:
  return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def name_function(function: Callable[..., Any]) -> str:
  """Returns the name of a function, also of a partial or callable object."""
  inner = getattr(function, "func", function)
  return getattr(inner, "__name__", type(inner).__name__)


def name_arguments(function: Callable[..., Any], count: int) -> list[str]:
  """Returns the names of the positional arguments."""
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):
    parameters = ()
  kinds = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
  )
  names = [p.name for p in parameters if p.kind in kinds][:count]
  return [*names, *(f"arguments[{i}]" for i in range(len(names), count))]


def _find_modules(arguments: Sequence[Any]) -> list[Any]:
  """Returns the modules that a function may change in place, at any depth."""
  # Modules of an older flax are no trees, and so no arguments.
  kind = getattr(sys.modules.get("flax.nnx"), "Pytree", None)
  if kind is None:
    return []

  def is_module(each: Any) -> bool:
    return isinstance(each, kind)

  return list(filter(is_module, jax.tree.leaves(arguments, is_leaf=is_module)))


def _check_shared(arguments: Sequence[Any], names: Sequence[str]) -> None:
  """Raises UserError for a variable of nnx that stands in two places."""
  nnx = sys.modules.get("flax.nnx")
  if nnx is None:
    return

  def is_variable(each: Any) -> bool:
    return isinstance(each, nnx.Variable)

  first: dict[int, str] = {}
  leaves = jax.tree_util.tree_leaves_with_path(
    tuple(arguments), is_leaf=is_variable
  )
  for path, value in leaves:
    if not is_variable(value):
      continue
    label = names[path[0].idx] + jax.tree_util.keystr(path[1:])
    other = first.setdefault(id(value), label)
    if other != label:
      raise user_error.UserError(
        f"{label} and {other} are one nnx.Variable, which would be planned as"
        " two: pass the state of nnx.split, and call nnx.merge in the function."
      )


def _find_inputs(
  leaves: Sequence[tuple[jax.tree_util.KeyPath, Any]],
  names: Sequence[str],
  arguments: Sequence[Any],
  in_shardings: Shardings,
) -> tuple[list[Input], list[int]]:
  """Returns the arrays among the leaves of the arguments, and their indices."""
  _check_shared(arguments, names)
  given = _spread(in_shardings, arguments, names)
  parts = [_count_parts(each) for each in arguments]
  inputs, places = [], []
  for place, (path, value) in enumerate(leaves):
    if not _is_array(value):
      continue
    argument = path[0].idx
    inner = path[1:]
    name = names[argument]
    is_split = 1 < parts[argument] <= _MAX_PARTS
    dtype = value.dtype
    if isinstance(value, np.ndarray | np.generic):
      dtype = jax.dtypes.canonicalize_dtype(dtype)
    shape = jax.ShapeDtypeStruct(value.shape, dtype)
    sharding = given[place]
    if sharding is None:
      own = getattr(value, "sharding", None)
      sharding = own if isinstance(own, NamedSharding) else None
    group = name + jax.tree_util.keystr(inner[:1]) if is_split else name
    label = name + jax.tree_util.keystr(inner)
    inputs.append(Input(argument, label, group, shape, sharding))
    places.append(place)
  if not inputs:
    raise user_error.UserError(
      "The arguments contain no arrays: give arrays or jax.ShapeDtypeStructs."
    )
  return inputs, places


def _count_parts(argument: Any) -> int:
  """Returns the number of children of the root of a tree."""

  def is_child(each: Any) -> bool:
    return each is not argument

  return len(jax.tree.leaves(argument, is_leaf=is_child))


def _is_sharding(each: Any) -> bool:
  return each is None or isinstance(each, PartitionSpec | jax.sharding.Sharding)


def _spread(
  shardings: Shardings, arguments: Sequence[Any], names: Sequence[str]
) -> list[PartitionSpec | NamedSharding | None]:
  """Returns the sharding of each leaf of the arguments, None if not given."""
  whole = tuple(arguments)
  if shardings is None:
    return [None] * len(jax.tree.leaves(whole))
  if isinstance(shardings, list):
    shardings = tuple(shardings)
  found: list[Any] = []

  def add(sharding: Any, part: Any) -> None:
    found.extend([sharding] * len(jax.tree.leaves(part)))

  try:
    jax.tree.map(add, shardings, whole, is_leaf=_is_sharding)
  except ValueError as error:
    raise user_error.UserError(
      "in_shardings must be a prefix of the tree of the arguments"
      f" ({', '.join(names)}), with a PartitionSpec, a NamedSharding or None"
      f" for each: {' '.join(str(error).split())}"
    ) from error
  for each in found:
    if not (each is None or isinstance(each, PartitionSpec | NamedSharding)):
      raise user_error.UserError(
        f"in_shardings: {each!r} must be a PartitionSpec, a NamedSharding or"
        " None."
      )
  return found


def find_donated(
  donate: int | str | Sequence[int | str],
  names: Sequence[str],
  inputs: Sequence[Input],
) -> set[int]:
  """Returns the indices of the inputs in donated arguments."""
  if isinstance(donate, int | str):
    donate = (donate,)
  wanted = tuple(donate)
  found: set[int] = set()
  for each in wanted:
    index = names.index(each) if each in names else each
    is_index = isinstance(index, int) and not isinstance(index, bool)
    if not is_index or not 0 <= index < len(names):
      raise user_error.UserError(
        f"donate: {each!r} is not an argument; give an index below"
        f" {len(names)} or one of {', '.join(names)}."
      )
    found |= {i for i, given in enumerate(inputs) if given.argument == index}
  return found


def sum_inputs(
  inputs: Sequence[Input], placed: Sequence[jax.ShapeDtypeStruct]
) -> dict[str, int]:
  """Returns the bytes of one device by argument."""
  sums: dict[str, int] = {}
  for given, array in zip(inputs, placed, strict=True):
    assert array.sharding is not None
    shape = array.sharding.shard_shape(array.shape)
    sums[given.group] = sums.get(given.group, 0) + count_bytes(
      shape, array.dtype
    )
  return sums


def count_bytes(shape: Sequence[int], dtype: Any) -> int:
  """Returns the bytes of an array; two elements of 4 bits share one."""
  bits = 8 * dtype.itemsize
  if jax.dtypes.issubdtype(dtype, np.integer) or "float" in str(dtype):
    bits = getattr(_get_info(dtype), "bits", bits)
  return -(-math.prod(shape) * bits // 8)


def _get_info(dtype: Any) -> Any:
  is_float = jax.dtypes.issubdtype(dtype, np.floating)
  return (jnp.finfo if is_float else jnp.iinfo)(dtype)
