"""Maps of names, from variables to their source arrays in Pax.

A map is a TOML file with a table `variables`, from a pattern of our names to
one source, or several of which the first that the checkpoint has is used:

  [variables]
  "params/final_norm/scale" = "norm(lm.final_ln.scale)"
  "params/stack/{layer}/feed_forward/up" = "lm.net.{layer}.ff.w1: F D -> D F"
  "params/stack/{layer}/attention/qkv" = [
    "lm.net.{layer}.attention.combined_qkv.w: C D N H -> D C N H",
    "lm.net.{layer}.attention.{query,key,value}.w: D N H -> D C N H",
  ]

A source is a name below `mdl_vars.params.`, or one that begins with
`non_trainable.` below `mdl_vars.`; these prefixes may be given. Then, all
optional:

  {layer}         a layer of a stack, in both names
  {a,b,c}         several arrays, which the pattern stacks
  [1]             an entry of the array's first axis, in each layer
  norm(...)       the scale of a norm, see `Source.is_norm`
  unpad(...)      the first entries, as many as the variable has
  first_half(...), second_half(...)
                  one of two arrays, stored one after the other
  query(...), key(...), value(...)
                  one of the projections of Megatron, whose heads are stored by
                  groups of queries, a key and a value
  pairs(...)      features of a head, neighbours of which rotate as a pair
  : D V -> V D    an axis pattern, see `axis_pattern`
  * sqrt(H)       a factor, behind a pattern: the root of the size of an axis

An empty text instead of a source leaves the initial value. A name of ours may
have alternatives in braces, too.

The layers of several stacks have the same names. They are written once, in the
table `layer`; the table `stacks` has where each stack is, in both names:

  [stacks]
  "params/encoder" = "model.encoder"
  [layer]
  "feed_forward/up" = "ff.w1: F D -> D F"

is "params/encoder/{layer}/feed_forward/up" = "model.encoder.{layer}.ff.w1...".

Layers that flax scans have no numbers. The table `scan` has the path of such a
layer and the axis of layers; then sources have them as `{layer}`:

  [scan]
  "decoder.layers" = 1

The functions behind `norm` are views (`array_views`). All of an array's entries
must be used, those of `unpad` excepted, the number of which is reported.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import os
import pathlib
import re
import tomllib
from typing import Any

from etils import epath

from paxon.runner import files, user_error
from paxon.tools.pax_checkpoints import array_views, axis_pattern

LAYER = "{layer}"
_FOLDER = pathlib.Path(__file__).parent
_VARIABLES, _STACKS, _LAYER_NAMES = "variables", "stacks", "layer"
_SCAN = "scan"
_NORM = "norm"
_FUNCTION = rf"(?P<function>{'|'.join((_NORM, *array_views.NAMES))})\("
_SOURCE = re.compile(
  rf"(?:{_FUNCTION})?(?P<name>[^\s:()\[\]]+?)(?:\[(?P<index>\d+)\])?"
  r"(?(function)\))(?:\s*:\s*(?P<pattern>.+))?"
)
_ROOT = re.compile(r"(?P<pattern>.*?)\s*\*\s*sqrt\((?P<axis>[A-Za-z]+)\)")
# Of our names: the layer of a stack, `layers/blocks_<number>`.
_OUR_LAYER = r"(?P<stack>[^/]+)/blocks_(?P<block>\d+)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """A source of a variable.

  Attributes:
    names: Names of arrays, several if they are stacked.
    index: Index of an entry of each layer's first axis; None for the array.
    is_norm: Whether it is a norm's scale. Praxis's layer norms store it minus
      one, RMS norms without a change.
    view: One of `array_views.NAMES`, or None for all entries.
    pattern: The rearrangement of a layer's axes, or None.
    root_axis: Values are multiplied by the root of the size of this axis; None
      for no factor.
  """

  names: tuple[str, ...]
  index: int | None = None
  is_norm: bool = False
  view: str | None = None
  pattern: axis_pattern.AxisPattern | None = None
  root_axis: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """The sources of the variables with names of one pattern.

  Attributes:
    name: The pattern of names.
    expression: Matches the whole name; its group `block` is the number of the
      layer in a repeated pattern.
    sources: Alternatives, best first; none leaves the initial value.
    where: The place of the rule, for errors.
    is_built_in: Whether it is one of Praxis's models, not of a user.
  """

  name: str
  expression: re.Pattern[str]
  sources: tuple[Source, ...]
  where: str
  is_built_in: bool = False


def read(path: epath.Path | None, *, format_name: str = "praxis") -> list[Rule]:
  """Returns the rules of a user's file, or none, and then the built-in ones.

  Args:
    path: The user's file.
    format_name: Names the built-in file.

  Raises:
    user_error.UserError: The file has an error, which the message names.
  """
  built_in = _read_built_in(format_name)
  rules = []
  if path is not None:
    if not path.is_file():
      raise user_error.UserError(f"--map={os.fspath(path)} is not a file.")
    where = os.fspath(path)
    tables = _parse(files.read_text(path), where)
    rules += [
      rule
      for name, given in tables[_VARIABLES].items()
      for rule in _make_rules(name, given, where)
    ]
    # The names of layers of a user's stack may be Praxis's.
    names = built_in[_LAYER_NAMES] | tables[_LAYER_NAMES]
    if tables[_STACKS] or tables[_LAYER_NAMES]:
      stacks = tables[_STACKS] or built_in[_STACKS]
      rules += _make_stack_rules(stacks, names, where)
  where = f"{format_name}_names.toml"
  for name, given in built_in[_VARIABLES].items():
    rules += [
      dataclasses.replace(rule, is_built_in=True)
      for rule in _make_rules(name, given, where)
    ]
  return rules + _make_stack_rules(
    built_in[_STACKS], built_in[_LAYER_NAMES], where
  )


def read_scans(
  path: epath.Path | None, *, format_name: str = "praxis"
) -> dict[str, int]:
  """Returns the axis of layers, by the path of each scanned layer.

  Raises:
    user_error.UserError: The file has an error, which the message names.
  """
  scans = dict(_read_built_in(format_name)[_SCAN])
  if path is not None:
    scans |= _parse(files.read_text(path), os.fspath(path))[_SCAN]
  for name, axis in scans.items():
    if not isinstance(axis, int) or axis < 0:
      raise user_error.UserError(
        f"[{_SCAN}] {name!r} must be the index of an axis, got {axis!r}."
      )
  return scans


def _read_built_in(format_name: str) -> dict[str, dict[str, Any]]:
  file = _FOLDER / f"{format_name}_names.toml"
  # Trees of orbax have no names in common.
  return _parse(file.read_text() if file.exists() else "[variables]", file.name)


def find(rules: Sequence[Rule], name: str) -> tuple[Rule, int | None] | None:
  """Returns the first rule for a variable, and its block's number."""
  for rule in rules:
    if matched := rule.expression.fullmatch(name):
      block = matched.groupdict().get("block")
      return rule, None if block is None else int(block)
  return None


def _parse(text: str, where: str) -> dict[str, dict[str, Any]]:
  """Returns the tables of a file, those that it lacks empty."""
  try:
    content = tomllib.loads(text)
  except tomllib.TOMLDecodeError as error:
    raise user_error.UserError(f"{where} is not TOML: {error}.") from error
  known = (_VARIABLES, _STACKS, _LAYER_NAMES, _SCAN)
  if (
    not content
    or not set(content) <= set(known)
    or not all(isinstance(table, Mapping) for table in content.values())
  ):
    raise user_error.UserError(
      f"{where} must have tables [{'], ['.join(known)}], got"
      f" {', '.join(content) or 'nothing'}."
    )
  return {name: content.get(name, {}) for name in known}


def _make_stack_rules(
  stacks: Mapping[str, object], names: Mapping[str, object], where: str
) -> list[Rule]:
  """Returns the rules of the layers of each stack."""
  rules = []
  for stack, source in stacks.items():
    if not isinstance(source, str):
      raise user_error.UserError(
        f"{where}: {stack!r} must be a text, got {source!r}."
      )
    start = rf"\g<0>{source}{'.' if source else ''}{LAYER}."
    for name, given in names.items():
      texts = given if isinstance(given, list) else [given]
      moved = [
        # Behind the beginning of a function.
        re.sub(rf"^\s*({_FUNCTION})?", start, x)
        if isinstance(x, str) and x
        else x
        for x in texts
      ]
      rules += _make_rules(f"{stack}/{LAYER}/{name}", moved, where)
  # Not all stacks have all of them.
  return [dataclasses.replace(rule, is_built_in=True) for rule in rules]


def _make_rules(name: str, given: object, where: str) -> Iterator[Rule]:
  for each in _expand(name):
    yield _make_rule(each, given, f"{where}: {name!r}")


def _make_rule(name: str, given: object, where: str) -> Rule:
  texts = [given] if isinstance(given, str) else given
  if not isinstance(texts, list) or not all(isinstance(x, str) for x in texts):
    raise user_error.UserError(
      f"{where} must be a text or a list of texts, got {given!r}."
    )
  sources = tuple(
    source for text in texts if text for source in _parse_source(text, where)
  )
  has_layer = name.count(LAYER)
  for source in sources:
    if {each.count(LAYER) for each in source.names} != {has_layer}:
      raise user_error.UserError(
        f"{where}: {LAYER} must be in the name and in its source, or in"
        f" neither, got {source.names[0]!r}."
      )
  if has_layer > 1:
    raise user_error.UserError(f"{where}: {LAYER} can occur once.")
  expression = re.escape(name).replace(re.escape(LAYER), _OUR_LAYER)
  return Rule(
    name=name,
    expression=re.compile(expression),
    sources=sources,
    where=where,
  )


def _parse_source(text: str, where: str) -> Iterator[Source]:
  matched = _SOURCE.fullmatch(text.strip())
  try:
    if matched is None:
      raise ValueError(
        "a source is NAME, NAME[INDEX] or FUNCTION(NAME), where FUNCTION is"
        f" {_NORM}, {', '.join(array_views.NAMES)}, and then an optional"
        " ': AXES -> AXES'"
      )
    pattern, root_axis = None, None
    if arrangement := matched["pattern"]:
      if scaled := _ROOT.fullmatch(arrangement):
        arrangement, root_axis = scaled["pattern"], scaled["axis"]
      pattern = axis_pattern.parse(arrangement)
      if root_axis is not None and (root_axis,) not in pattern.outputs:
        raise ValueError(f"sqrt({root_axis}) must name an axis of the pattern")
    function = matched["function"]
    if function in array_views.NAMES and pattern is None:
      raise ValueError(f"{function}(...) needs an axis pattern")
    name = matched["name"].removeprefix("mdl_vars.").removeprefix("params.")
    names = tuple(_expand(name))
    if (len(names) > 1) and (pattern is None or pattern.stacked is None):
      raise ValueError(
        "several arrays need an axis pattern with one more axis on the right"
      )
  except ValueError as error:
    raise user_error.UserError(f"{where}: {text!r}: {error}.") from error
  yield Source(
    names=names,
    index=None if matched["index"] is None else int(matched["index"]),
    is_norm=function == _NORM,
    view=None if function == _NORM else function,
    pattern=pattern,
    root_axis=root_axis,
  )


def _expand(name: str) -> list[str]:
  """Returns the names of a pattern with braces, `{layer}` excepted."""
  parts = re.split(r"(\{[^}]*\})", name)
  choices = [
    part[1:-1].split(",") if part.startswith("{") and part != LAYER else [part]
    for part in parts
  ]
  return ["".join(chosen) for chosen in itertools.product(*choices)]
