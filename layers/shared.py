"""Parts that share one set of parameters: `shared("name", part)`.

Wherever a part with this mark stands, in any block, in any layer of a stack,
scanned or not, its parameters are `shared/<name>/...`, one set for all places,
made by whichever is called first. Everything else stays with the place: each
has its own cache, statistics and random numbers. So places may differ in what
has no parameters, as the window of an attention.

Linen's own sharing, one module object in two fields, goes by the scope of the
first field, and breaks inside of lifted transforms. Here the parameters live in
a collection of their own, which every lifted transform hands on whole
(`nn.scan(variable_broadcast=[COLLECTION])`), at the root of the model. Inside a
transform there is no way to that root, so whoever lifts gives the places their
store before (`with_stores`).
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
from typing import Any, TypeVar, cast

from flax import errors
from flax import linen as nn
import jax

from paxon.sharding import variables

COLLECTION = variables.SHARED

_Module = TypeVar("_Module", bound=nn.Module)


def shared(label: str, part: nn.Module) -> "Shared":
  """Returns `part` with the parameters `shared/<label>/...`."""
  return Shared(label=label, part=part)


class Shared(nn.Module):
  """A place that uses shared parameters.

  Attributes:
    label: Name of the set of parameters.
    part: What is called with these parameters. All parts of a label must have
      parameters of the same names and shapes.
    store: Where the parameters are; set by `with_stores`, not by users.
  """

  label: str
  part: nn.Module
  store: nn.Module | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    if not self.label or "/" in self.label:
      raise ValueError(
        f"Shared.label must be a name without '/', got {self.label!r}."
      )
    inner = next(_places(self.part), None)
    if inner is not None:
      raise ValueError(
        f"The part of shared({self.label!r}) must not hold a shared part, got "
        f"{inner.label!r} in it."
      )

  @nn.compact
  def __call__(
    self, *args: Any, method: str = "__call__", **kwargs: Any
  ) -> Any:
    """Calls a method of the part."""
    blank = self.part.copy(parent=None, name=None)

    def init() -> Any:
      # A constant key, because values may not depend on the layer that comes
      # first; `sharding.initialization` computes the real ones.
      key = jax.random.key(0)
      return blank.init(key, *args, method=method, **kwargs)["params"]

    params = self._store().values_or(init)
    # Keywords by closure: some are constants of the compilation.
    call = nn.map_variables(
      lambda part, *args: getattr(part, method)(*args, **kwargs),
      "params",
      trans_in_fn=lambda _: {"params": params},
    )
    try:
      return call(self.part, *args)
    except (errors.ScopeParamShapeError, errors.ScopeParamNotFoundError) as e:
      raise ValueError(
        f"A part that is shared({self.label!r}) does not fit the parameters "
        f"that another one made: {str(e).partition(' (https:')[0]}"
      ) from e

  def attend(self, x: jax.Array) -> jax.Array:
    """Calls `attend` of a shared embedding."""
    return self(x, method="attend")

  def unbind(self: _Module) -> tuple[_Module, Mapping[str, Any]]:
    """Returns the place alone and its variables, the shared ones included."""
    place = cast(Shared, self)
    module, own = super(Shared, place).unbind()
    values = place._store().variables.get(COLLECTION, {})
    alone = cast(_Module, module.clone(store=None))
    return alone, {**own, COLLECTION: {place.label: values}}

  def _store(self) -> "_Store":
    if self.store is not None:
      return cast(_Store, self.store)
    assert self.scope is not None
    return _store(self.scope.root, self.label)


class _Store(nn.Module):
  """Holds the parameters of one label, in a scope below the root's."""

  label: str

  def values_or(self, init: Callable[[], Any]) -> Any:
    """Returns the parameters, made by `init` if there are none."""
    if not self.variables.get(COLLECTION):
      if not self.is_mutable_collection(COLLECTION):
        raise ValueError(
          f"The variables hold no {COLLECTION}/{self.label}, the parameters "
          f"of parts that are shared({self.label!r})."
        )
      for name, value in init().items():
        self.put_variable(COLLECTION, name, value)
    return variables.unbox(self.variables[COLLECTION])

  def clone(self, **updates: Any) -> Any:
    """Returns itself for the deep copies that stacks make of their blocks."""
    # Flax's own name; a test fails where it changes.
    if self.scope is not None and updates.get("_deep_clone"):
      return self
    return super().clone(**updates)


def with_stores(part: nn.Module, *, owner: nn.Module) -> nn.Module:
  """Returns a copy whose shared parts know where their parameters are.

  For whoever calls `part` inside a lifted transform; the transform finds the
  store's scope in the copy.

  Args:
    part: A template, not bound.
    owner: A bound module outside of the transform.
  """
  copied = part.copy(parent=None, name=None)
  for place in _places(copied):
    if place.store is None:
      assert owner.scope is not None
      place.store = _store(owner.scope.root, place.label)
  return copied


def has_shared(module: nn.Module) -> bool:
  """Returns whether a shared part is in `module`."""
  return next(_places(module), None) is not None


def iterate_submodules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
  """Yields the modules in the fields of a module, with their fields."""
  for field in dataclasses.fields(module):
    if field.name in ("parent", "name"):
      continue
    for leaf in jax.tree.leaves(getattr(module, field.name)):
      if isinstance(leaf, nn.Module):
        yield field.name, leaf


def _places(module: nn.Module) -> Iterator[Shared]:
  if isinstance(module, Shared):
    yield module
  for _, part in iterate_submodules(module):
    if not isinstance(part, _Store):
      yield from _places(part)


def _store(root: Any, label: str) -> _Store:
  """Returns the store of a label below the root's scope."""
  taken = root.reservations.get(label, set())
  if COLLECTION not in taken:
    if None in taken:
      raise ValueError(
        f"shared({label!r}) has the name of a part of the model, "
        f"{label!r}; choose another one."
      )
    root.reserve(label, COLLECTION)
  # With a name, or the next part that has it in a field would adopt it.
  return _Store(label, parent=root.push(label, reuse=True), name=label)
