"""Fiddle tags of fields that many layers have: dtypes, dropout, initializers.

`add` tags a configuration; Fiddle's own functions then select and set:

  field_tags.add(config)
  selectors.select(config, tag=field_tags.DropoutRate).replace(0.1)

Every field with the tag is set, also one that the experiment has set. Tags do
not change what is built, and are not stored with a run. A default object with
such fields, as the projections of attention, becomes a configuration.
"""

from collections.abc import Mapping
import dataclasses
from typing import Final

import fiddle as fdl

from paxon.runner.configuration import tree


class ComputeDtype(fdl.Tag):
  """Dtype of a layer's computation."""


class ParamDtype(fdl.Tag):
  """Dtype in which a layer's parameters are stored."""


class DropoutRate(fdl.Tag):
  """Share of values that dropout sets to zero."""


class WeightInit(fdl.Tag):
  """Initializer of a kernel or table, not of a bias or scale."""


_FIELDS: Final[Mapping[str, type[fdl.Tag]]] = {
  "dtype": ComputeDtype,
  "param_dtype": ParamDtype,
  "dropout_rate": DropoutRate,
  "kernel_init": WeightInit,
  "query_init": WeightInit,
  "output_init": WeightInit,
  "embedding_init": WeightInit,
  "table_init": WeightInit,
}


def add(config: fdl.Buildable) -> dict[str, type[fdl.Tag]]:
  """Adds tags to the fields of all configured classes, in place.

  Functions, such as initializers with an argument `dtype`, get none. `rate` is
  a dropout rate in a class whose name has `Dropout`, such as flax's.

  Returns:
    The tags by path, in the order of the configuration.
  """
  added: dict[str, type[fdl.Tag]] = {}
  for path, node in tree.nodes(config):
    target = fdl.get_callable(node)
    if not isinstance(target, type):
      continue
    for field in tree.field_names(node):
      _expand(node, field)
      tag = _FIELDS.get(field)
      if field == "rate" and "Dropout" in target.__name__:
        tag = DropoutRate
      if tag is not None:
        fdl.add_tag(node, field, tag)
        added[tree.join(path, field)] = tag
  return added


def _expand(node: fdl.Buildable, field: str) -> None:
  """Configures the default object of an unset field with tagged fields."""
  default = None if tree.is_set(node, field) else tree.get_value(node, field)
  if isinstance(default, type) or not dataclasses.is_dataclass(default):
    return
  if tree.is_linen(type(default)):
    return
  if any(f.init and f.name in _FIELDS for f in dataclasses.fields(default)):
    setattr(node, field, tree.to_config(default))
