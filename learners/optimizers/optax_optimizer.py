"""Any optimizer of optax, applied to each layer separately.

To optax an array is one variable: a trust ratio, a norm or a factored moment of
a stack of layers would mix the layers. `per_layer` maps a transformation over
the leading axes of stacked variables with `jax.vmap`, so that a scanned model
is trained like an unrolled one.
"""

from collections.abc import Callable
import dataclasses
import functools
import inspect
from typing import Any, TypeAlias

from flax import traverse_util
import jax
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import optimizer

# From the specs of variables, without stacked axes, to their transformation.
Make: TypeAlias = Callable[
  [variable_groups.Specs | None], optax.GradientTransformation
]
_MASKS = ("mask", "weight_decay_mask")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptaxOptimizer:
  """An optimizer of optax, such as `optax.lamb`.

  Attributes:
    schedule: Maps a step to a learning rate.
    make: Returns the optimizer, such as
      `functools.partial(optax.lamb, weight_decay=0.1)`. It is called with
      `learning_rate`. If it has an argument `mask` or `weight_decay_mask` that
      is not set, that is the tree of `VariableSpec.regularized`.
  """

  schedule: optax.Schedule
  make: Callable[..., optax.GradientTransformation]

  def __post_init__(self) -> None:
    if "learning_rate" not in _arguments(self.make):
      raise ValueError(
        "OptaxOptimizer.make must have an argument learning_rate, as optimizers"
        f" of optax have, got {_name(self.make)}; call scale_by functions in"
        " optax.chain with optax.scale_by_learning_rate(learning_rate)."
      )

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule.

    `specs` None decays all variables and treats none as stacked.
    """

    def make(
      specs: variable_groups.Specs | None,
    ) -> optax.GradientTransformation:
      arguments: dict[str, Any] = {"learning_rate": self.schedule}
      if specs is not None:
        regularized = optimizer.find_regularized(specs)
        arguments |= dict.fromkeys(_unset_masks(self.make), regularized)
      return self.make(**arguments)

    return optimizer.with_standard_promotion(per_layer(make, specs))


def per_layer(
  make: Make, specs: variable_groups.Specs | None
) -> optax.GradientTransformation:
  """Returns a transformation that is applied to each layer separately.

  Variables with the same stacked axes are passed together. The state is a dict
  from their axes and sizes, such as `layers_12`, to the state of `make(...)`
  with leading axes of these sizes; `unstacked` are the others.

  Args:
    make: Returns the transformation of the variables of one layer.
    specs: Specs of all variables; None treats none as stacked.
  """
  if specs is None:
    return make(None)
  flat: dict[Any, Any] = traverse_util.flatten_dict(specs)
  groups: dict[str, dict[Any, Any]] = {}
  for path, spec in flat.items():
    groups.setdefault(_group_name(spec), {})[path] = spec
  transforms, depths = {}, {}
  for name, group in groups.items():
    layers = {
      path: dataclasses.replace(
        spec,
        shape=spec.layer_shape,
        axes=spec.axes[len(spec.stacked) :],
        stacked=(),
      )
      for path, spec in group.items()
    }
    transforms[name] = make(traverse_util.unflatten_dict(layers))
    depths[name] = len(next(iter(group.values())).stacked)

  def select(tree: Any, name: str) -> Any:
    values: dict[Any, Any] = traverse_util.flatten_dict(tree)
    return traverse_util.unflatten_dict(
      {path: values[path] for path in groups[name]}
    )

  def init(params: Any) -> dict[str, Any]:
    return {
      name: _map_leading(transform.init, depths[name])(select(params, name))
      for name, transform in transforms.items()
    }

  def update(
    updates: Any, state: Any, params: Any = None
  ) -> tuple[Any, dict[str, Any]]:
    parts, states = [], {}
    for name, transform in transforms.items():
      fn = _map_leading(transform.update, depths[name])
      part, states[name] = fn(
        select(updates, name),
        state[name],
        None if params is None else select(params, name),
      )
      parts.append(part)
    return variable_groups.merge(*parts), states

  return optax.GradientTransformation(init, update)


def _group_name(spec: Any) -> str:
  depth = len(spec.stacked)
  sizes = zip(spec.axes[:depth], spec.shape[:depth], strict=True)
  return "_".join(f"{axis}_{size}" for axis, size in sizes) or "unstacked"


def _map_leading(fn: Callable[..., Any], depth: int) -> Callable[..., Any]:
  return functools.reduce(lambda inner, _: jax.vmap(inner), range(depth), fn)


def _arguments(make: Callable[..., Any]) -> tuple[str, ...]:
  return tuple(inspect.signature(make).parameters)


def _unset_masks(make: Callable[..., Any]) -> list[str]:
  given = make.keywords if isinstance(make, functools.partial) else {}
  return [
    name for name in _arguments(make) if name in _MASKS and name not in given
  ]


def _name(make: Callable[..., Any]) -> str:
  inner = make.func if isinstance(make, functools.partial) else make
  return getattr(inner, "__name__", repr(inner))
