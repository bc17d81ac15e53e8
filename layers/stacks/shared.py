"""Parameter sharing: `shared("name", module)`.

Modules with the same name, in any block and in any layer of a stack, scanned or
not, have one set of parameters, `shared/<name>/...`, created by the first call.
Caches, statistics and random numbers are separate for each use, and settings
without parameters, such as the window of attention, may differ.

Linen's own sharing (one module object in two fields) depends on the scope of
the first field and breaks in lifted transforms. Here the parameters are in a
separate collection at the root of the model, which every lifted transform
broadcasts (`nn.scan(variable_broadcast=[COLLECTION])`). The root cannot be
reached inside a transform, so code that lifts a module calls `with_stores`
before.
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
  """Returns a module with the parameters `shared/<label>/...`."""
  return Shared(label=label, part=part)


class Shared(nn.Module):
  """A module that uses shared parameters.

  Attributes:
    label: Name of the set of parameters.
    part: The module. All modules with one label must have parameters of the
      same names and shapes.
    store: Owner of the parameters, set by `with_stores`.
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
    inner = next(_find_shared(self.part), None)
    if inner is not None:
      raise ValueError(
        f"The module in shared({self.label!r}) must not contain a shared"
        f" module, got {inner.label!r}."
      )

  @nn.compact
  def __call__(
    self, *args: Any, method: str = "__call__", **kwargs: Any
  ) -> Any:
    """Calls a method of the module."""
    blank = self.part.copy(parent=None, name=None)

    def init() -> Any:
      # A constant key, because values must not depend on which layer is first;
      # `sharding.initialization` computes the real values.
      key = jax.random.key(0)
      return blank.init(key, *args, method=method, **kwargs)["params"]

    params = self._store().get_or_init(init)
    # Keywords by closure, because some are compile-time constants.
    call = nn.map_variables(
      lambda part, *args: getattr(part, method)(*args, **kwargs),
      "params",
      trans_in_fn=lambda _: {"params": params},
    )
    try:
      return call(self.part, *args)
    except (errors.ScopeParamShapeError, errors.ScopeParamNotFoundError) as e:
      raise ValueError(
        f"A module in shared({self.label!r}) does not match the parameters of"
        f" another one: {str(e).partition(' (https:')[0]}"
      ) from e

  def attend(self, x: jax.Array) -> jax.Array:
    """Calls `attend` of a shared embedding."""
    return self(x, method="attend")

  def unbind(self: _Module) -> tuple[_Module, Mapping[str, Any]]:
    """Returns the unbound module and its variables, including shared ones."""
    site = cast(Shared, self)
    module, own = super(Shared, site).unbind()
    values = site._store().variables.get(COLLECTION, {})
    alone = cast(_Module, module.clone(store=None))
    return alone, {**own, COLLECTION: {site.label: values}}

  def _store(self) -> "_Store":
    if self.store is not None:
      return cast(_Store, self.store)
    assert self.scope is not None
    return _get_store(self.scope.root, self.label)


class _Store(nn.Module):
  """Owns the parameters of one label, in a scope below the root."""

  label: str

  def get_or_init(self, init: Callable[[], Any]) -> Any:
    """Returns the parameters, created by `init` if missing."""
    if not self.variables.get(COLLECTION):
      if not self.is_mutable_collection(COLLECTION):
        raise ValueError(
          f"The variables do not have {COLLECTION}/{self.label}, the parameters"
          f" of shared({self.label!r})."
        )
      for name, value in init().items():
        self.put_variable(COLLECTION, name, value)
    return variables.unbox(self.variables[COLLECTION])

  def clone(self, **updates: Any) -> Any:
    """Returns itself in the deep copies that stacks make of their blocks."""
    # A private name of flax; a test fails if it changes.
    if self.scope is not None and updates.get("_deep_clone"):
      return self
    return super().clone(**updates)


def with_stores(part: nn.Module, *, owner: nn.Module) -> nn.Module:
  """Returns a copy whose shared modules can be called in a lifted transform.

  `part` is an unbound template, `owner` a bound module outside of the
  transform.
  """
  copied = part.copy(parent=None, name=None)
  for site in _find_shared(copied):
    if site.store is None:
      assert owner.scope is not None
      site.store = _get_store(owner.scope.root, site.label)
  return copied


def has_shared(module: nn.Module) -> bool:
  """Returns whether `module` contains a shared module."""
  return next(_find_shared(module), None) is not None


def iterate_submodules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
  """Yields `(field, submodule)` of a module."""
  for field in dataclasses.fields(module):
    if field.name in ("parent", "name"):
      continue
    for leaf in jax.tree.leaves(getattr(module, field.name)):
      if isinstance(leaf, nn.Module):
        yield field.name, leaf


def _find_shared(module: nn.Module) -> Iterator[Shared]:
  if isinstance(module, Shared):
    yield module
  for _, part in iterate_submodules(module):
    if not isinstance(part, _Store):
      yield from _find_shared(part)


def _get_store(root: Any, label: str) -> _Store:
  """Returns the store of a label below the root scope."""
  taken = root.reservations.get(label, set())
  if COLLECTION not in taken:
    if None in taken:
      raise ValueError(
        f"shared({label!r}) has the name of a submodule of the model; choose"
        " another name."
      )
    root.reserve(label, COLLECTION)
  # Named, or the next module that has it in a field would adopt it.
  return _Store(label, parent=root.push(label, reuse=True), name=label)
