"""What a family of models is: its module, and the names of its weights.

A family says of a `config.json` which module has the same outputs, and where
each tensor of theirs stands in our variables. Tensors of a layer are described
once, for all layers of a stack:

```python
embedding = rule("model.embed.weight", "params/embedding/table", "V D -> V D")
query = rule("layers.{}.q.weight", "attention/query", "(N H) D -> D N H")
names = Names(
  sizes={"V": 256, "D": 64, "N": 4, "H": 16},
  rules=(embedding,),
  stacks=(StackRules(stack="params/stack", num_layers=2, rules=(query,)),),
)
```
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import re
from typing import Any, Protocol

import jax.numpy as jnp

from paxon.layers.models.hugging_face import layout
from paxon.sharding import axes


@dataclasses.dataclass(frozen=True)
class Part:
  """A range of rows of a tensor of theirs, and the array it is with us.

  Attributes:
    leaf: Our name: whole (`params/embedding/table`), or, of a stack, what
      follows the block (`attention/query`).
    pattern: Of `layout.Layout`: their dimensions, then ours.
  """

  leaf: str
  pattern: str


@dataclasses.dataclass(frozen=True)
class Rule:
  """A tensor of theirs: the parts, in the order of its rows.

  Attributes:
    tensor: Their name; of a stack, with `{}` for the number of the layer.
    parts: One, or several that are concatenated along the first dimension.
  """

  tensor: str
  parts: tuple[Part, ...]


def rule(tensor: str, leaf: str, pattern: str) -> Rule:
  """Returns the rule of a tensor that is one array with us.

  Args:
    tensor: Their name.
    leaf: Ours.
    pattern: Of `layout.Layout`.
  """
  return Rule(tensor, (Part(leaf, pattern),))


def fused(tensor: str, *parts: tuple[str, str]) -> Rule:
  """Returns the rule of a tensor that is several arrays with us.

  Args:
    tensor: Their name.
    *parts: `(leaf, pattern)` of each, in the order of their rows.
  """
  return Rule(tensor, tuple(Part(*part) for part in parts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRules:
  """The rules of all layers of one `layers.stack.Stack`.

  Attributes:
    stack: Its name, such as `params/stack`.
    num_layers: Its number of layers.
    rules: Of any layer.
    period: The number of its blocks.
    first: The number that their first layer has.
  """

  stack: str
  num_layers: int
  rules: tuple[Rule, ...]
  period: int = 1
  first: int = 0

  def place(self, layer: int) -> tuple[str, int | None]:
    """Returns the name of a layer's block, and its index where it is stacked.

    Args:
      layer: From 0.
    """
    groups = self.num_layers // self.period
    if layer < groups * self.period:
      block = f"{axes.LAYERS}/blocks_{layer % self.period}"
      return f"{self.stack}/{block}", layer // self.period
    return f"{self.stack}/{axes.LAYERS}_{layer}", None


@dataclasses.dataclass(frozen=True)
class Piece:
  """Where a range of rows of one tensor goes.

  Attributes:
    leaf: Our whole name.
    layer: The index along the first dimension of a stacked leaf; `None` if the
      leaf is not stacked.
    layout: Of the piece.
    start: Its first row in the tensor.
  """

  leaf: str
  layer: int | None
  layout: layout.Layout
  start: int

  @property
  def stop(self) -> int:
    """The row after its last."""
    return self.start + self.layout.their_shape[0]


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of theirs.

  Attributes:
    name: Its whole name.
    pieces: In the order of its rows.
  """

  name: str
  pieces: tuple[Piece, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """Its shape."""
    rest = self.pieces[0].layout.their_shape[1:]
    return (self.pieces[-1].stop, *rest)


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array of ours, and what it is made of.

  Attributes:
    name: Its whole name.
    shape: Its shape, the leading `layers` included.
    sources: Tensors and which of their pieces, in the order of layers.
  """

  name: str
  shape: tuple[int, ...]
  sources: tuple[tuple[Tensor, Piece], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
  """All weights of a model, by both names.

  Attributes:
    sizes: Of the dimensions that patterns name.
    rules: Of what stands in no stack.
    stacks: Of layers.
    tied: Tensors that a file may hold though they are another one: by name, the
      name of that. They are compared when read, and not written.
    ignored: Regular expressions of whole names of theirs that are no weights,
      such as masks that old versions stored.
    prefix: What files of the model without a head leave out of all names.
    former: Endings of names in files of the first versions, and what they are
      called since; read, and not written.
  """

  sizes: Mapping[str, int]
  rules: tuple[Rule, ...] = ()
  stacks: tuple[StackRules, ...] = ()
  tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
  ignored: tuple[str, ...] = ()
  prefix: str = ""
  former: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def tensors(self) -> Mapping[str, Tensor]:
    """Theirs, by name."""
    found: dict[str, Tensor] = {}
    for tensor in self._all_tensors():
      if tensor.name in found:
        raise ValueError(f"Two rules name the tensor {tensor.name}.")
      found[tensor.name] = tensor
    return found

  @functools.cached_property
  def leaves(self) -> Mapping[str, Leaf]:
    """Ours, by name, each with its sources in the order of layers."""
    sources: dict[str, list[tuple[Tensor, Piece]]] = {}
    for tensor in self.tensors.values():
      for piece in tensor.pieces:
        sources.setdefault(piece.leaf, []).append((tensor, piece))
    found = {}
    for name, each in sources.items():
      shape = each[0][1].layout.our_shape
      if each[0][1].layer is not None:
        shape = (len(each), *shape)
      elif len(each) > 1:
        raise ValueError(f"Two rules name the leaf {name}.")
      found[name] = Leaf(name, shape, tuple(each))
    return found

  def current(self, name: str) -> str:
    """Returns what a tensor of a file is called since the first versions.

    Args:
      name: In the file.
    """
    for ending, since in self.former.items():
      if name.endswith(ending):
        return name.removesuffix(ending) + since
    return name

  def is_ignored(self, name: str) -> bool:
    """Whether a tensor of theirs is no weight.

    Args:
      name: Its whole name, with the prefix.
    """
    return any(re.fullmatch(each, name) for each in self.ignored)

  def _all_tensors(self) -> Iterator[Tensor]:
    for each in self.rules:
      yield self._tensor(each.tensor, each, "", None)
    for stack in self.stacks:
      for each in stack.rules:
        for layer in range(stack.num_layers):
          block, index = stack.place(layer)
          name = each.tensor.format(layer + stack.first)
          yield self._tensor(name, each, f"{block}/", index)

  def _tensor(
    self, name: str, of: Rule, before: str, layer: int | None
  ) -> Tensor:
    pieces, start = [], 0
    for part in of.parts:
      piece = Piece(
        f"{before}{part.leaf}",
        layer,
        layout.Layout(part.pattern, self.sizes),
        start,
      )
      pieces.append(piece)
      start = piece.stop
    return Tensor(name, tuple(pieces))


def _build(cls: Callable[..., Any], /, **fields: Any) -> Any:
  """Returns a part itself. Here, as tables of names need no layers."""
  return cls(**fields)


class Description(Protocol):
  """A model that a `config.json` describes, every field read or refused."""

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the module, or what `make` makes of it."""
    ...

  def names(self) -> Names:
    """Returns the names of its weights."""
    ...


def _token_example() -> tuple[Any, ...]:
  """Returns ids, positions and segment ids."""
  ids = jnp.zeros((1, 2), jnp.int32)
  return ids, ids, ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """Models that one class of transformers computes.

  Attributes:
    model_type: What `config.json` calls it.
    architecture: The class whose tensors are served.
    read: Returns what a `config.json` describes.
    example: Returns what the model can be initialized with.
  """

  model_type: str
  architecture: str
  read: Callable[[Mapping[str, Any]], Description]
  example: Callable[[], tuple[Any, ...]] = _token_example

  def model(
    self,
    config: Mapping[str, Any],
    make: Callable[..., Any] = _build,
  ) -> Any:
    """Returns the module of a `config.json`, or what `make` makes of it.

    Args:
      config: The content of the file.
      make: Called with a class and its fields.

    Raises:
      UnservedConfigError: A field has a value that is not served.
    """
    return self.read(config).model(make)

  def names(self, config: Mapping[str, Any]) -> Names:
    """Returns the names of the weights.

    Args:
      config: The content of the file.

    Raises:
      UnservedConfigError: A field has a value that is not served.
    """
    return self.read(config).names()
