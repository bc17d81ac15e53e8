"""Plan of an import: the source arrays of each variable.

A layer `l` of a stack of Praxis is in the array of `x_layers_<i>`, at the index
`r` of the leading axes that repeats and stages add, with `l = r n + i` for `n`
numbered layers. Those axes are circular repeats, stages and repeats, in this
order, so that their flat index counts layers as the model runs them. A layer of
ours is in the array of `blocks_<b>` at an index of one leading axis likewise.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import math
import re

import jax.numpy as jnp
import numpy as np

from paxon.layers.norms import norm_scale
from paxon.runner import user_error
from paxon.runner.checkpoints import lazy_array
from paxon.sharding import suggestions, variables
from paxon.tools.pax_checkpoints import (
  array_blocks,
  array_views,
  axis_pattern,
  name_map,
  pax_files,
)

PARAMS, _OTHERS = "params.", "non_trainable."
# Praxis's name of a layer, or that of flax.
_LAYER = r"(?P<wrap>(?:[^.]+\.)*?)(?:x_)?layers_(?P<number>\d+)"

Arrays = Mapping[str, pax_files.PaxArray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """The sources of one entry of a variable's leading axis, or of all of it.

  Attributes:
    names: Names of arrays, below `mdl_vars.`.
    index: Flat index of their leading axes; None for arrays of one layer.
  """

  names: tuple[str, ...]
  index: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
  """The sources of a variable.

  Attributes:
    spec: The variable.
    source: The rule's source.
    entries: One for each entry of the leading axis of a stacked variable.
    is_stacked: Whether the variable has that axis.
    shift: Added to all values.
    direct_scale: Whether arrays have the scale of a norm itself; None for other
      variables.
  """

  spec: variables.VariableSpec
  source: name_map.Source
  entries: tuple[Entry, ...]
  is_stacked: bool
  shift: float
  direct_scale: bool | None

  @property
  def names(self) -> set[str]:
    """The names of all arrays, below `mdl_vars.`."""
    return {name for entry in self.entries for name in entry.names}

  @property
  def layer_shape(self) -> tuple[int, ...]:
    """The shape of an entry."""
    return self.spec.shape[1:] if self.is_stacked else self.spec.shape

  @property
  def pattern(self) -> axis_pattern.AxisPattern:
    """The rearrangement of an entry."""
    given = self.source.pattern
    return given or axis_pattern.make_identity(len(self.layer_shape))

  def read(
    self,
    arrays: Arrays,
    *,
    dtype: np.dtype,
    factor: float = 1.0,
    is_value: bool = True,
    dropped: str | None = None,
  ) -> lazy_array.Blocks:
    """Returns the variable, or what an optimizer keeps for it, in blocks.

    Args:
      arrays: By the variable's name in Praxis, below `mdl_vars.`.
      dtype: Dtype of the result.
      factor: Factor on all values.
      is_value: Whether they are values of the variable, which are shifted, and
        whose padding must be zero.
      dropped: The axis of the pattern over which arrays are means; it has size
        one in the result.

    Raises:
      user_error.UserError: An array cannot be read, or its padding is not zero.
    """
    pattern, sizes = self.pattern, self.pattern.find_sizes(self.layer_shape)
    shape = self.layer_shape
    if is_value and self.source.root_axis is not None:
      factor *= math.sqrt(sizes[self.source.root_axis])
    at = None
    if dropped is not None:
      at = [group[0] for group in pattern.outputs].index(dropped)
      shape = (*shape[:at], 1, *shape[at + 1 :])
      pattern = pattern.drop(dropped)
    conversion = array_blocks.Conversion(
      pattern=pattern,
      sizes=sizes,
      entry=self.source.index,
      num_layers=self.spec.shape[0] if self.is_stacked else None,
      mean_axis=at,
      is_padding_zero=is_value,
      dtype=dtype,
      factor=factor,
      shift=self.shift if is_value else 0.0,
    )
    numbers: dict[tuple[str, ...], dict[int, int]] = {}
    for number, entry in enumerate(self.entries):
      numbers.setdefault(entry.names, {})[entry.index or 0] = number
    view = self.source.view
    parts = [
      array_blocks.Part(
        array=array_views.make(arrays[name], view, pattern, sizes)
        if view
        else arrays[name],
        layers=layers,
        index=index,
      )
      for names, layers in numbers.items()
      for index, name in enumerate(names)
    ]
    whole = (*self.spec.shape[:1], *shape) if self.is_stacked else shape
    return array_blocks.make(parts, conversion, shape=whole)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The plan of all variables of a model.

  Attributes:
    assignments: By the variable's name.
    initial: Names of variables that a rule leaves at their initial values.
    ambiguous: Lines about arrays whose shape also fits another axis pattern,
      and about padding that is not imported.
  """

  assignments: Mapping[str, Assignment]
  initial: tuple[str, ...]
  ambiguous: tuple[str, ...]


def make(
  specs: Sequence[variables.VariableSpec],
  arrays: Arrays,
  rules: Sequence[name_map.Rule],
  *,
  direct_scale: bool | None,
) -> Plan:
  """Returns the plan.

  Args:
    specs: The variables of the model.
    arrays: By their names below `mdl_vars.`.
    rules: A map of names.
    direct_scale: Whether Praxis's norms store the scale itself; None is the
      default of their class.

  Raises:
    user_error.UserError: A variable has no source, or one of another shape.
  """
  assignments, initial, ambiguous = {}, [], []
  problems = _find_unused_rules(specs, rules)
  for spec in specs:
    found = name_map.find(rules, spec.name)
    if found is None:
      problems.append(_describe_missing(spec, None, arrays))
      continue
    rule, block = found
    if not rule.sources:
      initial.append(spec.name)
      continue
    mistakes = []
    for source in rule.sources:
      try:
        entries = _find_entries(spec, source, block, arrays)
      except ValueError as error:
        mistakes.append(str(error))
        continue
      if entries is not None:
        is_direct = _find_direct_scale(source, entries, arrays, direct_scale)
        assignments[spec.name] = Assignment(
          spec=spec,
          source=source,
          entries=entries,
          is_stacked=block is not None,
          shift=_find_shift(spec, is_direct),
          direct_scale=is_direct,
        )
        ambiguous += _find_twins(spec, source, rule, entries)
        break
    else:
      problems.append(
        f"{spec.name} {mistakes[0]}"
        if mistakes
        else _describe_missing(spec, rule.sources[0], arrays)
      )
  # Without some of the variables, entries are unused.
  problems = problems or _find_unused_entries(assignments.values(), arrays)
  if problems:
    raise user_error.UserError(
      "The checkpoint does not fit the experiment:"
      f" {suggestions.limit(problems)}."
    )
  ambiguous += _find_padding(assignments.values(), arrays)
  return Plan(
    assignments=assignments,
    initial=tuple(initial),
    ambiguous=tuple(ambiguous),
  )


def _find_twins(
  spec: variables.VariableSpec,
  source: name_map.Source,
  rule: name_map.Rule,
  entries: Sequence[Entry],
) -> Iterator[str]:
  """Yields a line for each other pattern of a source that fits its array."""
  used, name = source.pattern, entries[0].names[0]
  shape = spec.shape[len(spec.shape) - len(used.outputs) :] if used else ()
  for other in rule.sources:
    if (
      used is None
      or other.pattern is None
      or other.pattern == used
      or (other.names, other.index) != (source.names, source.index)
      or len(other.pattern.inputs) != len(used.inputs)
    ):
      continue
    first, second = (
      each.input_shape(each.find_sizes(shape)) for each in (used, other.pattern)
    )
    if first == second:
      yield (f"{name} is read as {used}, but {other.pattern} fits, too (--map)")


def _find_unused_entries(
  assignments: Iterable[Assignment], arrays: Arrays
) -> list[str]:
  """Returns a line for each array of which views do not use all entries."""
  used: dict[str, int] = {}
  for each in assignments:
    if each.source.view not in (None, array_views.UNPAD):
      for entry in each.entries:
        for name in entry.names:
          used[name] = used.get(name, 0) + math.prod(each.layer_shape)
  return [
    f"{arrays[name].name} has shape {arrays[name].shape}, and the experiment"
    f" uses {count:,} of its {math.prod(arrays[name].shape):,} values"
    " (num_kv_heads)"
    for name, count in used.items()
    if count != math.prod(arrays[name].shape)
  ]


def _find_padding(
  assignments: Iterable[Assignment], arrays: Arrays
) -> Iterator[str]:
  """Yields a line for each array with entries that are left out."""
  for each in assignments:
    if each.source.view == array_views.UNPAD:
      for name in sorted(each.names):
        wanted = each.pattern.input_shape(
          each.pattern.find_sizes(each.layer_shape)
        )
        if arrays[name].shape[-len(wanted) :] != wanted:
          yield (
            f"{arrays[name].name} has shape {arrays[name].shape}, of which"
            f" {wanted} are imported, as the rest is padding (vocab_size)"
          )


def _find_unused_rules(
  specs: Sequence[variables.VariableSpec], rules: Sequence[name_map.Rule]
) -> list[str]:
  """Returns a line for each rule of a user that matches no variable."""
  names = [spec.name for spec in specs]
  return [
    f"{rule.where} matches no variable of the experiment"
    + suggestions.suggest(rule.name, names).rstrip(".?")
    for rule in rules
    if not rule.is_built_in and not any(map(rule.expression.fullmatch, names))
  ]


def _find_entries(
  spec: variables.VariableSpec,
  source: name_map.Source,
  block: int | None,
  arrays: Arrays,
) -> tuple[Entry, ...] | None:
  """Returns the entries of a variable; None if the checkpoint has none.

  Raises:
    ValueError: It has the arrays, but they do not fit.
  """
  templates = [_full_name(name) for name in source.names]
  if block is None:
    if not all(name in arrays for name in templates):
      return None
    entry = Entry(names=tuple(templates), index=None)
    for name in templates:
      if _count_layers(spec.shape, source, arrays[name]) != 1:
        raise ValueError(
          f"has shape {spec.shape}, and {name} has {arrays[name].shape}, with"
          " more axes"
        )
    return (entry,)
  found = [_find_layers(template, arrays) for template in templates]
  if not all(found):
    return None
  layers, period = found[0][0], _count_numbered(templates[0], arrays)
  count = spec.stacked[0][1]
  first = arrays[next(iter(layers.values()))]
  repeats = _count_layers(spec.shape[1:], source, first)
  entries = []
  total = spec.shape[0] * count
  if repeats * period != total:
    raise ValueError(
      f"belongs to {total} layers, and the checkpoint has {repeats * period}"
      " (num_layers)"
    )
  for number in range(spec.shape[0]):
    index, remainder = divmod(number * count + block, period)
    if not all(remainder in each for (each,) in found):
      return None
    names = tuple(each[remainder] for (each,) in found)
    for name in names:
      _count_layers(spec.shape[1:], source, arrays[name])
    entries.append(Entry(names=names, index=index))
  return tuple(entries)


def _count_layers(
  shape: Sequence[int], source: name_map.Source, array: pax_files.PaxArray
) -> int:
  """Returns the product of an array's leading axes, those of repeats.

  Raises:
    ValueError: The other axes do not fit a layer.
  """
  pattern = source.pattern or axis_pattern.make_identity(len(shape))
  sizes = pattern.find_sizes(shape)
  wanted = pattern.input_shape(sizes)
  if source.view is not None:
    array = array_views.make(array, source.view, pattern, sizes)
  if source.index is not None:
    wanted = (source.index + 1, *wanted)
  depth = len(array.shape) - len(wanted)
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise ValueError(
      f"needs floating-point values, and {array.name} has {array.dtype.name}"
    )
  known = array.unpadded or array.shape
  fits = depth >= 0
  for i, (size, want) in enumerate(
    zip(known[max(depth, 0) :], wanted, strict=False)
  ):
    is_entry = source.index is not None and i == 0
    # Without metadata, larger arrays may be padded; that is checked when read.
    is_exact = array.unpadded is not None and not is_entry
    fits &= size == want if is_exact else size >= want
  if not fits:
    raise ValueError(
      f"has shape {tuple(shape)}{' in a layer' if depth > 0 else ''}, and"
      f" {array.name} has {known}, expected {wanted} at its end"
    )
  return math.prod(known[:depth])


def _find_layers(template: str, arrays: Arrays) -> list[dict[int, str]]:
  """Returns the name of each numbered layer, or nothing without arrays."""
  prefix, suffix = template.split(name_map.LAYER)
  expression = re.compile(re.escape(prefix) + _LAYER + re.escape(suffix))
  found: dict[str, dict[int, str]] = {}
  for name in arrays:
    if matched := expression.fullmatch(name):
      found.setdefault(matched["wrap"], {})[int(matched["number"])] = name
  if len(found) > 1:
    raise ValueError(f"has several sources: {', '.join(map(repr, found))}")
  return list(found.values())


def _count_numbered(template: str, arrays: Arrays) -> int:
  """Returns the number of numbered layers of a stack."""
  prefix, _ = template.split(name_map.LAYER)
  expression = re.compile(re.escape(prefix) + _LAYER + r"\..*")
  matches = (expression.fullmatch(name) for name in arrays)
  return 1 + max(int(m["number"]) for m in matches if m)


def _find_direct_scale(
  source: name_map.Source,
  entries: Sequence[Entry],
  arrays: Arrays,
  given: bool | None,
) -> bool | None:
  """Returns whether a norm's scale is stored itself, not minus one."""
  if not source.is_norm or given is not None:
    return given if source.is_norm else None
  folder = entries[0].names[0].rpartition(".")[0]
  # An RMS norm has no bias.
  return f"{folder}.bias" not in arrays


def _find_shift(
  spec: variables.VariableSpec, direct_scale: bool | None
) -> float:
  """Returns the shift of a stored scale of a norm, 0 for other variables."""
  if direct_scale is None:
    return 0.0
  offset = (
    spec.initializer.offset
    if isinstance(spec.initializer, norm_scale.StoredInit)
    else 0.0
  )
  return (0.0 if direct_scale else 1.0) - offset


def _describe_missing(
  spec: variables.VariableSpec,
  source: name_map.Source | None,
  arrays: Arrays,
) -> str:
  if source is None:
    wanted, text = spec.name.replace("/", "."), "has no rule in the map"
  else:
    wanted = _full_name(source.names[0])
    text = f"needs {wanted}, which the checkpoint lacks"
  close = suggestions.find_closest(
    wanted.replace(name_map.LAYER, "x_layers_0"), arrays
  )
  return f"{spec.name} {text}" + (
    f" (the closest name is {close[0]})" if close else ""
  )


def _full_name(name: str) -> str:
  return name if name.startswith(_OTHERS) else f"{PARAMS}{name}"
