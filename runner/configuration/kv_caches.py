"""How the caches of a configuration keep keys and values."""

import dataclasses

import fiddle as fdl
from flax import linen as nn

from paxon.layers.attention import quantized_rows
from paxon.runner.configuration import tree

_CACHE, _STORAGE = "cache", "storage"


def set_where_unset(config: fdl.Buildable, name: str) -> list[str]:
  """Sets the storage of every cache that does not say its own, in place.

  An attention whose cache is its class's default gets one of that class. Parts
  without a storage (`NoCache`) have nothing to set.

  Args:
    config: The root; all parts below it are visited.
    name: A format of `QuantizedRows`.

  Returns:
    The paths of the storages that were set.

  Raises:
    ValueError: There is no such format.
  """
  quantized_rows.QuantizedRows(name)
  changed = []
  for path, node in tree.nodes(config):
    fields = tree.field_names(node)
    default = tree.value_of(node, _CACHE) if _CACHE in fields else None
    if isinstance(default, nn.Module) and not tree.is_set(node, _CACHE):
      if _STORAGE not in {field.name for field in dataclasses.fields(default)}:
        continue
      # Its fields as the class that has it chose them.
      node.cache = fdl.Config(type(default), **_given(default))
      path, node = tree.join(path, _CACHE), node.cache
      fields = tree.field_names(node)
    if _STORAGE in fields and not tree.is_set(node, _STORAGE):
      node.storage = fdl.Config(quantized_rows.QuantizedRows, name)
      changed.append(tree.join(path, _STORAGE))
  return changed


def _given(cache: nn.Module) -> dict[str, object]:
  """Returns the fields of a cache that are not the defaults of its class."""
  hidden = ("parent", "name", _STORAGE)
  return {
    field.name: value
    for field in dataclasses.fields(cache)
    if field.name not in hidden
    and (value := getattr(cache, field.name)) != field.default
  }
