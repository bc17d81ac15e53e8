"""Mapping between Hugging Face tensors and Paxon variables.

A rule names a tensor, the variable it is stored in, and the layout of both.
Tensors of a layer are described once, for all layers of a stack:

```python
embedding = rule("model.embed.weight", "params/embedding/table", "V D -> V D")
query = rule("layers.{}.q.weight", "attention/query", "(N H) D -> D N H")
names = Names(
  sizes={"V": 256, "D": 64, "N": 4, "H": 16},
  rules=(embedding,),
  stacks=(StackRules(stack="params/stack", num_layers=2, rules=(query,)),),
)
```

A mapping only moves values, so a round trip is exact bit by bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any, Final, TypeVar

import numpy as np

from paxon.layers.models.hugging_face.files import quantized_config
from paxon.sharding import axes

_TOKEN = re.compile(r"\(([^()]*)\)|(\w+)")
# A dimension of a size that the tensor has, at an index: `2:0`.
_FIXED = re.compile(r"(\d+):(\d+)")

# After the pattern of a weight whose layer has a bias.
_AND_BIAS: Final = " + bias"
# Stands for the number of an expert in names of tensors.
EXPERT: Final = "{expert}"

T = TypeVar("T")

# `(tensor's name, first row, row after the last) -> those rows`.
ReadRows = Callable[[str, int, int], np.ndarray]


def split_dimensions(terms: str) -> tuple[tuple[str, ...], ...]:
  """Returns the dimensions of each term, such as `(N H) D`."""
  found = _TOKEN.findall(terms)
  return tuple(tuple((merged or one).split()) for merged, one in found)


@dataclasses.dataclass(frozen=True)
class Layout:
  """A pattern such as `(N H) D -> D N H` with the sizes of its dimensions.

  Attributes:
    pattern: Dimensions of the tensor, merged ones in parentheses, an arrow, and
      the same dimensions in the order of the variable. `D (F 2:1) -> D F` is
      every second column of the tensor, from the one with index 1 on.
    sizes: By dimension, at least those of the pattern.
  """

  pattern: str
  sizes: Mapping[str, int]

  def __post_init__(self) -> None:
    if sorted(self._kept) != sorted(self._variable):
      raise ValueError(
        f"Both sides of the pattern {self.pattern!r} must have the same"
        " dimensions."
      )
    joined = (x for part in self._joined for x in part.split("*"))
    needed = (*self._variable, *joined)
    missing = [name for name in needed if name not in self.sizes]
    if missing:
      raise ValueError(
        f"The pattern {self.pattern!r} needs the size of {missing[0]!r}; sizes"
        f" has {sorted(self.sizes)}."
      )

  @functools.cached_property
  def _tensor(self) -> tuple[tuple[str, ...], ...]:
    return split_dimensions(self.pattern.partition("->")[0])

  @functools.cached_property
  def _merged(self) -> tuple[tuple[str, ...], ...]:
    return split_dimensions(self.pattern.partition("->")[2])

  @functools.cached_property
  def _variable(self) -> tuple[str, ...]:
    return tuple(name for merged in self._merged for name in merged)

  @functools.cached_property
  def _kept(self) -> tuple[str, ...]:
    """The dimensions that the variable has."""
    found: list[str] = []
    for x in (x for merged in self._tensor for x in merged if ":" not in x):
      parts = [part.split("*") for part in x.split("+")]
      found += next((p for p in parts if set(p) <= set(self._variable)), [x])
    return tuple(found)

  @functools.cached_property
  def _joined(self) -> tuple[str, ...]:
    """Dimensions that share the rows of a tensor, or none."""
    last = "".join(self._tensor[0][-1:])
    return tuple(last.split("+")) if "+" in last else ()

  @property
  def is_scalar(self) -> bool:
    """Whether the tensor has no dimensions; it is read as one row."""
    return self._tensor == ((),)

  @property
  def shares_rows(self) -> bool:
    """Whether the rows of a tensor are also those of other variables."""
    return bool(self._joined) or self.columns != slice(None)

  def find_rows(self) -> list[slice]:
    """Returns the rows of the tensor that the variable holds."""
    count = self.tensor_shape[0]
    if not self._joined:
      return [slice(0, count)]
    widths = [self._width(part) for part in self._joined]
    which = next(
      i
      for i, part in enumerate(self._joined)
      if set(part.split("*")) <= set(self._variable)
    )
    first = sum(widths[:which])
    return [
      slice(i + first, i + first + widths[which])
      for i in range(0, count, sum(widths))
    ]

  @property
  def columns(self) -> slice:
    """Columns of the tensor that the variable holds."""
    fixed = _FIXED.fullmatch("".join(self._tensor[-1][-1:]))
    if fixed is None:
      return slice(None)
    return slice(int(fixed[2]), None, int(fixed[1]))

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """Shape of the Hugging Face tensor."""
    return tuple(
      math.prod(
        int(name.split(":")[0])
        if ":" in name
        else sum(map(self._width, name.split("+")))
        for name in merged
      )
      for merged in self._tensor
    )

  def _width(self, part: str) -> int:
    """Returns the rows of one of the terms that share a dimension."""
    return math.prod(self.sizes[name] for name in part.split("*"))

  @property
  def variable_shape(self) -> tuple[int, ...]:
    """Shape of the Paxon variable."""
    return tuple(
      math.prod(self.sizes[name] for name in merged) for merged in self._merged
    )

  def to_variable(self, tensor: np.ndarray) -> np.ndarray:
    """Returns a tensor in the layout of the variable, a view if possible."""
    tensor = tensor[..., self.columns]
    if self._joined:
      tensor = np.concatenate([tensor[rows] for rows in self.find_rows()])
    split = tensor.reshape([self.sizes[name] for name in self._kept])
    split = split.transpose([self._kept.index(name) for name in self._variable])
    return split.reshape(self.variable_shape)

  def to_tensor(self, variable: np.ndarray) -> np.ndarray:
    """Returns the values of a variable in the layout of the tensor.

    They have only the rows and columns of the variable.
    """
    split = variable.reshape([self.sizes[name] for name in self._variable])
    split = split.transpose([self._variable.index(name) for name in self._kept])
    shape = list(self.tensor_shape)
    shape[-1] = len(range(shape[-1])[self.columns])
    if self._joined:
      shape[0] = sum(rows.stop - rows.start for rows in self.find_rows())
    return split.reshape(shape)


@dataclasses.dataclass(frozen=True)
class Rule:
  """A Hugging Face tensor and the variables that it holds.

  Attributes:
    tensor: Its name; in a stack, with `{}` for the number of the layer. With
      `{expert}` there is a tensor for each expert, which is an entry of the
      variable along its first dimension (after that of layers).
    variables: `(leaf, pattern)` of each variable, concatenated along the first
      dimension of the tensor, unless patterns share rows. A leaf is a whole
      name, or, in a stack, the name below the block.
    layers: Layers of the stack that have the tensor; `None` is all.
  """

  tensor: str
  variables: tuple[tuple[str, str], ...]
  layers: tuple[int, ...] | None = None


def rule(
  tensor: str, leaf: str, pattern: str, *, layers: tuple[int, ...] | None = None
) -> Rule:
  """Returns the rule of a tensor that holds one variable."""
  return Rule(tensor, ((leaf, pattern),), layers)


def fused_rule(
  tensor: str,
  *variables: tuple[str, str],
  layers: tuple[int, ...] | None = None,
) -> Rule:
  """Returns the rule of a tensor that holds several variables."""
  return Rule(tensor, variables, layers)


def parse_rules(
  table: str,
  *,
  at: str = "",
  to: str = "",
  layers: tuple[int, ...] | None = None,
) -> tuple[Rule, ...]:
  """Returns the rules of a table.

  Args:
    table: Lines of a tensor, its leaf and the pattern. The pattern `norm`
      stands for a layer norm: scale and bias, `D -> D`. With ` + bias` after
      it, the line stands for weight and bias, whose dimension is the weight's
      first.
    at: Prefix of the tensors.
    to: Prefix of the leaves.
    layers: Layers of a stack that have them; `None` is all.
  """
  found: list[Rule] = []
  for line in filter(None, map(str.strip, table.splitlines())):
    tensor, leaf, pattern = line.split(maxsplit=2)
    weight = pattern.removesuffix(_AND_BIAS)
    if pattern == "norm":
      weight, bias, of_bias = "D -> D", f"{leaf}/bias", "D -> D"
      leaf = f"{leaf}/scale"
    elif weight != pattern:
      left, right = map(split_dimensions, weight.split("->"))
      kept = " ".join(x for merged in right for x in merged if x in left[0])
      of_bias = f"({' '.join(left[0])}) -> {kept}"
      is_linear = leaf.endswith("/kernel")
      bias = f"{leaf[:-6]}bias" if is_linear else f"{leaf}_bias"
    else:
      found.append(rule(at + tensor, to + leaf, pattern, layers=layers))
      continue
    for end, variable, each in (
      ("weight", leaf, weight),
      ("bias", bias, of_bias),
    ):
      names = f"{at}{tensor}.{end}", to + variable
      found.append(rule(*names, each, layers=layers))
  return tuple(found)


def find_period(layers: Sequence[T]) -> tuple[T, ...]:
  """Returns the shortest prefix that, repeated, gives all layers.

  The last repetition may be incomplete. Layers without a pattern are one
  period, and each of them is compiled separately.
  """
  for period in range(1, len(layers) + 1):
    if all(layers[i] == layers[i % period] for i in range(len(layers))):
      return tuple(layers[:period])
  return tuple(layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRules:
  """The rules of all layers of one `layers.stacks.stack.Stack`.

  Attributes:
    stack: Name of the stack, such as `params/stack`.
    num_layers: Number of layers.
    rules: Rules of any layer.
    period: Number of blocks in its pattern.
    first: Number of the first layer in tensor names.
  """

  stack: str
  num_layers: int
  rules: tuple[Rule, ...]
  period: int = 1
  first: int = 0

  def find_block(self, layer: int) -> tuple[str, int | None]:
    """Returns the name of a layer's block, and its index if it is stacked."""
    groups = self.num_layers // self.period
    if layer < groups * self.period:
      block = f"{axes.LAYERS}/blocks_{layer % self.period}"
      return f"{self.stack}/{block}", layer // self.period
    return f"{self.stack}/{axes.LAYERS}_{layer}", None


@dataclasses.dataclass(frozen=True)
class Slice:
  """A range of rows of a tensor, and the variable it is stored in.

  Attributes:
    leaf: Whole name of the variable.
    index: Entry of the variable along its leading dimensions: of layers, if it
      is stacked, and of experts, if these have tensors of their own.
    layout: Layout of the slice.
    start: First row in the tensor.
  """

  leaf: str
  index: tuple[int, ...]
  layout: Layout
  start: int

  @property
  def stop(self) -> int:
    """The row after the last."""
    return self.start + self.layout.tensor_shape[0]


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A Hugging Face tensor.

  Attributes:
    name: Whole name.
    slices: In the order of rows.
  """

  name: str
  slices: tuple[Slice, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the tensor."""
    layout = self.slices[0].layout
    if layout.is_scalar:
      return ()
    return (self.slices[-1].stop, *layout.tensor_shape[1:])


@dataclasses.dataclass(frozen=True)
class Leaf:
  """A Paxon variable and the tensors that it is made of.

  Attributes:
    name: Whole name.
    shape: Shape, including the leading `layers` and `experts`.
    sources: Tensors and their slices, in the order of layers.
  """

  name: str
  shape: tuple[int, ...]
  sources: tuple[tuple[Tensor, Slice], ...]

  def from_tensors(self, read_rows: ReadRows, dtype: Any = None) -> np.ndarray:
    """Returns the variable; memory holds it and one slice of a tensor.

    `dtype` None keeps the dtype of the tensors.
    """

    def read(tensor: Tensor, part: Slice) -> np.ndarray:
      rows = read_rows(tensor.name, part.start, part.stop)
      return part.layout.to_variable(rows)

    # A stacked variable of one layer has the leading dimension, too.
    if not self.sources[0][1].index:
      rows = read(*self.sources[0])
      return np.array(rows, dtype or rows.dtype)
    result: np.ndarray | None = None
    for tensor, part in self.sources:
      rows = read(tensor, part)
      if result is None:
        result = np.empty(self.shape, dtype or rows.dtype)
      result[part.index] = rows
    assert result is not None
    return result

  def to_tensors(
    self, variable: np.ndarray
  ) -> Iterator[tuple[str, int, np.ndarray, slice]]:
    """Yields slices of tensors: name, first row, rows, and their columns."""
    for tensor, part in self.sources:
      values = np.asarray(variable[part.index])
      layout = part.layout
      rows, done = layout.to_tensor(values), 0
      for each in layout.find_rows():
        end = done + each.stop - each.start
        first = part.start + each.start
        yield tensor.name, first, rows[done:end], layout.columns
        done = end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
  """All weights of a model, by both names.

  Attributes:
    sizes: Sizes of the dimensions that patterns name.
    rules: Rules of variables outside of stacks.
    stacks: Rules of layers.
    tied: Tensors that files may hold as a copy of another one, by name. They
      are compared when read, and not written.
    copied: Tensors that files may leave out if they equal another one, by name.
      They are read from it, and written.
    ignored: Regular expressions of names of tensors that are not weights, such
      as masks in old files.
    kept: Regular expressions of names of weights that the model does not use.
      An import keeps them, and an export writes them again.
    prefix: Prefix that files of the model without a head leave out.
    former: Suffixes of names in old files, and their current form.
    transposed: Regular expressions of names of weights of linear layers that
      are stored as [inputs, outputs]. Quantized, they are [outputs, inputs].
    quantization: The quantized weights that files may have.
    moved: Regular expressions of parts of names in files of larger models, and
      their replacements.
  """

  sizes: Mapping[str, int]
  rules: tuple[Rule, ...] = ()
  stacks: tuple[StackRules, ...] = ()
  tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
  copied: Mapping[str, str] = dataclasses.field(default_factory=dict)
  ignored: tuple[str, ...] = ()
  kept: tuple[str, ...] = ()
  prefix: str = ""
  former: Mapping[str, str] = dataclasses.field(default_factory=dict)
  transposed: tuple[str, ...] = ()
  quantization: quantized_config.Scheme | None = None
  moved: tuple[tuple[str, str], ...] = ()

  def rename(self, parts: Mapping[str, str]) -> "Names":
    """Returns the names with parts of those of tensors replaced, in order."""

    def new(name: str) -> str:
      for old, part in parts.items():
        name = name.replace(old, part)
      return name

    def renew(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
      return tuple(
        dataclasses.replace(each, tensor=new(each.tensor)) for each in rules
      )

    return dataclasses.replace(
      self,
      rules=renew(self.rules),
      stacks=tuple(
        dataclasses.replace(each, rules=renew(each.rules))
        for each in self.stacks
      ),
      tied={new(name): new(of) for name, of in self.tied.items()},
      prefix=new(self.prefix),
    )

  @functools.cached_property
  def tensors(self) -> Mapping[str, Tensor]:
    """Hugging Face tensors by name."""
    found: dict[str, Tensor] = {}
    for tensor in self._all_tensors():
      if tensor.name in found:
        raise ValueError(f"Two rules name the tensor {tensor.name}.")
      found[tensor.name] = tensor
    return found

  @functools.cached_property
  def leaves(self) -> Mapping[str, Leaf]:
    """Paxon variables by name."""
    sources: dict[str, list[tuple[Tensor, Slice]]] = {}
    for tensor in self.tensors.values():
      for part in tensor.slices:
        sources.setdefault(part.leaf, []).append((tensor, part))
    found = {}
    for name, each in sources.items():
      shape = each[0][1].layout.variable_shape
      indices = [part.index for _, part in each]
      if len(set(indices)) < len(each):
        raise ValueError(f"Two rules name the leaf {name}.")
      leading = (max(along) + 1 for along in zip(*indices, strict=True))
      shape = (*leading, *shape)
      found[name] = Leaf(name, shape, tuple(each))
    return found

  def to_current(self, name: str) -> str:
    """Returns the current name of a tensor that may have another one."""
    for pattern, current in self.moved:
      name = re.sub(pattern, current, name)
    for suffix, current in self.former.items():
      if name.endswith(suffix):
        return name.removesuffix(suffix) + current
    return name

  def is_ignored(self, name: str) -> bool:
    """Whether the model has no such weight; `name` includes the prefix."""
    return self.is_kept(name) or any(
      re.fullmatch(each, name) for each in self.ignored
    )

  def is_transposed(self, name: str) -> bool:
    """Whether a weight of a linear layer is stored as [inputs, outputs]."""
    return any(re.fullmatch(each, name) for each in self.transposed)

  def is_kept(self, name: str) -> bool:
    """Whether a tensor is a weight that the model does not use."""
    return any(re.fullmatch(each, name) for each in self.kept)

  def _all_tensors(self) -> Iterator[Tensor]:
    for each in self.rules:
      yield self._make_tensor(each.tensor, each, "", ())
    for stack in self.stacks:
      for each in stack.rules:
        for layer in range(stack.num_layers):
          if each.layers is not None and layer not in each.layers:
            continue
          block, index = stack.find_block(layer)
          indices = () if index is None else (index,)
          names = [each.tensor.format(layer + stack.first, expert="{expert}")]
          experts: list[tuple[int, ...]] = [()]
          if EXPERT in each.tensor:
            experts = [(i,) for i in range(self.sizes["E"])]
            names = [names[0].format(expert=i) for (i,) in experts]
          for name, expert in zip(names, experts, strict=True):
            where = (*indices, *expert)
            yield self._make_tensor(name, each, f"{block}/", where)

  def _make_tensor(
    self, name: str, rule: Rule, scope: str, index: tuple[int, ...]
  ) -> Tensor:
    slices, start = [], 0
    for leaf, pattern in rule.variables:
      layout = Layout(pattern, self.sizes)
      slices.append(Slice(f"{scope}{leaf}", index, layout, start))
      start = 0 if layout.shares_rows else slices[-1].stop
    return Tensor(name, tuple(slices))
