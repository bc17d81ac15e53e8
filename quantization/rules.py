"""Quantization rules: the recipe of each layer of a model.

```python
(
  rules.ExemptLayers(first=1, last=1),
  rules.Rule("*.blocks[0].attention", None),
  rules.Rule(matmuls.FEED_FORWARD, recipes.find_recipe("fp8_current")),
  rules.Rule(("attention_projections", "head"), recipes.find_recipe("int8")),
)
```

Rules are ordered; the first that matches a layer applies. Layers without a
matching rule are not quantized. `runner.configuration.rewrites` applies rules.
"""

from collections.abc import Sequence
import dataclasses
import re

from paxon.quantization import matmuls
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import checks, suggestions


@dataclasses.dataclass(frozen=True)
class Rule:
  """The recipe of the matmuls of some layers.

  Attributes:
    target: A role (`matmuls.ROLES`), or a path in the configuration with `*`
      as a wildcard, such as `task.model.stack.blocks[0].*`; or a tuple of
      them, of which any may match.
    recipe: Recipe of the layers; `None` exempts them from later rules.
  """

  target: str | tuple[str, ...]
  recipe: recipe_lib.Recipe | None

  def __post_init__(self) -> None:
    if not self.targets:
      raise ValueError("Rule.target must name a role or a path, got none.")
    for target in self.targets:
      if target in matmuls.ROLES or not target.isidentifier():
        continue
      close = suggestions.find_closest(target, matmuls.ROLES)
      hint = f"; did you mean {close[0]!r}?" if close else "."
      raise ValueError(
        f"Rule.target {target!r} is no role ({', '.join(matmuls.ROLES)}) and, "
        f"without a dot or '*', no path{hint}"
      )
    # Reject a name of a recipe here, not where the recipe is used.
    if not isinstance(self.recipe, recipe_lib.Recipe | None):
      raise TypeError(
        "Rule.recipe must be a Recipe, such as recipes.find_recipe('fp8'), or"
        " None, "
        f"got {self.recipe!r}."
      )

  @property
  def targets(self) -> tuple[str, ...]:
    """The roles and paths."""
    return (self.target,) if isinstance(self.target, str) else self.target

  def matches(self, path: str, its_roles: Sequence[str]) -> bool:
    """Returns whether the rule applies to a layer."""
    return any(
      target in its_roles or bool(_pattern(target).fullmatch(path))
      for target in self.targets
    )


@dataclasses.dataclass(frozen=True)
class ExemptLayers:
  """Exempts the first and last layers of each stack from quantization.

  Attributes:
    first: Number of exempt layers at the start of a stack.
    last: Number of exempt layers at the end of a stack.
  """

  first: int = 0
  last: int = 0

  def __post_init__(self) -> None:
    checks.check_non_negative(self, "first", "last")
    if not self.first and not self.last:
      raise ValueError(
        "ExemptLayers exempts nothing; set first, last, or both."
      )


Rules = Sequence[Rule | ExemptLayers]


def _pattern(target: str) -> re.Pattern[str]:
  return re.compile(".*".join(map(re.escape, target.split("*"))))
