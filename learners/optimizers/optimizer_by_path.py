"""Several optimizers in one, selected by variable name.

Rules are ordered: the first whose pattern matches the whole logical name (such
as "params/decoder/embedding/table") gets the variable. Each optimizer receives
only its own variables, so its statistics over variables cover only these.
Gradients are clipped before, over all optimized variables; a rule may clip its
own further. Variables that are overwritten with their gradient have no
optimizer.
"""

from collections.abc import Sequence
import dataclasses
import re
from typing import Any

from flax import traverse_util
import optax

from paxon.learners import variable_clipping, variable_groups
from paxon.learners.optimizers import optimizer as optimizer_lib
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class PathRule:
  """One optimizer and its variables.

  Attributes:
    name: Name of the optimizer in metrics and checkpoints.
    pattern: Regular expression that must match the whole logical name.
    optimizer: Optimizer, such as `adamw.AdamW`.
    max_grad_norm: Largest global norm of the gradients of its variables; `None`
      disables this clipping.
  """

  name: str
  pattern: str
  optimizer: optimizer_lib.Optimizer
  max_grad_norm: float | None = None

  def __post_init__(self) -> None:
    checks.check_positive(self, "max_grad_norm")
    if not re.fullmatch(r"\w+", self.name):
      raise ValueError(
        "PathRule.name must consist of letters, digits and underscores, got"
        f" {self.name!r}."
      )
    checks.check_pattern("PathRule.pattern", self.pattern)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerByPath:
  """An optimizer that applies a different optimizer to each set of variables.

  Attributes:
    rules: Ordered; the first that matches a variable applies.
  """

  rules: Sequence[PathRule]

  def __post_init__(self) -> None:
    if not self.rules:
      raise ValueError("OptimizerByPath.rules must hold at least one rule.")
    names = [rule.name for rule in self.rules]
    for name in names:
      if names.count(name) > 1:
        raise ValueError(
          f"OptimizerByPath.rules must have different names, got {name!r}"
          f" {names.count(name)} times."
        )

  @property
  def schedule(self) -> optax.Schedule:
    """The schedule of the first rule, reported as `learning_rate`."""
    return self.rules[0].optimizer.schedule

  @property
  def schedules(self) -> dict[str, optax.Schedule]:
    """The schedule of each optimizer by rule name."""
    return {rule.name: rule.optimizer.schedule for rule in self.rules}

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule; its state is {rule name: optimizer state}.

    Raises:
      ValueError: `specs` is `None`, a variable matches no rule, or a rule
        applies to no variable.
    """
    if specs is None:
      raise ValueError(
        "OptimizerByPath.transform needs the specs of the variables, because"
        " patterns match their names."
      )
    paths = self._paths(specs)
    transforms = {
      rule.name: rule.optimizer.transform(_select(specs, paths[rule.name]))
      for rule in self.rules
    }
    max_norms = {rule.name: rule.max_grad_norm for rule in self.rules}

    def init(params: optax.Params) -> dict[str, optax.OptState]:
      return {
        name: transform.init(_select(params, paths[name]))
        for name, transform in transforms.items()
      }

    def update(
      updates: optax.Updates,
      state: Any,
      params: optax.Params | None = None,
    ) -> tuple[optax.Updates, Any]:
      parts, new_state = [], {}
      for name, transform in transforms.items():
        gradients: Any = _select(updates, paths[name])
        if (max_norm := max_norms[name]) is not None:
          gradients = variable_clipping.clip_by_global_norm(
            gradients, max_norm=max_norm
          )
        part, new_state[name] = transform.update(
          gradients,
          state[name],
          None if params is None else _select(params, paths[name]),
        )
        parts.append(part)
      return variable_groups.merge(*parts), new_state

    return optax.GradientTransformation(init, update)

  def _paths(
    self, specs: variable_groups.Specs
  ) -> dict[str, list[tuple[str, ...]]]:
    """Returns the paths of each rule's variables by rule name."""
    paths: dict[str, list[Any]] = {rule.name: [] for rule in self.rules}
    flat: dict[Any, Any] = traverse_util.flatten_dict(specs)
    for path, spec in flat.items():
      matching = [
        rule.name
        for rule in self.rules
        if re.fullmatch(rule.pattern, spec.name)
      ]
      if not matching:
        patterns = ", ".join(repr(rule.pattern) for rule in self.rules)
        raise ValueError(
          f"No pattern of OptimizerByPath matches {spec.name} (patterns:"
          f" {patterns}); add a rule, such as a last one with '.*'."
        )
      paths[matching[0]].append(path)
    for rule in self.rules:
      if not paths[rule.name]:
        raise ValueError(
          f"The rule {rule.name!r} of OptimizerByPath has no variable: its"
          f" pattern {rule.pattern!r} matches none that an earlier rule has"
          " not; the whole logical name must match."
        )
    return paths


def _select(tree: Any, paths: list[tuple[str, ...]]) -> dict[str, Any]:
  flat: dict[Any, Any] = traverse_util.flatten_dict(tree)
  return traverse_util.unflatten_dict({path: flat[path] for path in paths})
