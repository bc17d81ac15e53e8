"""Quantization of a configuration by rules.

Each layer with a field `einsum` that holds a plain contraction, and each
attention with the plain kernel, gets a provider (`QuantizedEinsum`) of its own,
with the recipe of the first rule that matches it. Nothing else changes: layers
know nothing of recipes, and a configuration without rules is left alone.
"""

from collections.abc import Iterator
import copy
import dataclasses
from typing import Any

import fiddle as fdl
from jax import numpy as jnp

from paxon.layers import edged_stack, precision, stack
from paxon.layers.attention import kernels
from paxon.quantization import einsum as quantized
from paxon.quantization import products
from paxon.quantization import recipe as recipe_lib
from paxon.quantization import rules as rules_lib
from paxon.runner import user_error
from paxon.runner.configuration import tree
from paxon.sharding import suggestions

# What a provider may take the place of.
_PLAIN = (jnp.einsum, precision.wide_einsum)
_EINSUM, _KERNEL = "einsum", "kernel"


@dataclasses.dataclass(frozen=True)
class _Site:
  """A field whose products can be quantized.

  Attributes:
    path: As rules name it: that of the layer, or of an attention's kernel.
    node: The layer.
    field: `einsum` or `kernel`.
    roles: Of the products.
  """

  path: str
  node: fdl.Buildable
  field: str
  roles: tuple[str, ...]


def apply(
  config: fdl.Buildable, rules: rules_lib.Rules, *, monitor: bool = False
) -> None:
  """Quantizes layers, in place.

  Args:
    config: The root; all parts below it are visited.
    rules: In order; the first that matches a layer has it.
    monitor: Whether training tells what products lose (`quantization.monitor`).

  Raises:
    user_error.UserError: A rule matches no layer, or one whose products cannot
      be quantized so; or rules differ about the places of one part.
  """
  sites = list(_sites(config))
  chosen: dict[tuple[int, str], tuple[_Site, rules_lib.Rule | None]] = {}
  used: set[int] = set()
  of_layers = [r for r in rules if isinstance(r, rules_lib.Rule)]
  for site in sites:
    rule = next(
      (r for r in of_layers if r.matches(site.path, site.roles)), None
    )
    if rule is not None:
      used.add(id(rule))
    key = (id(site.node), site.field)
    before, other = chosen.setdefault(key, (site, rule))
    if (rule and rule.recipe) != (other and other.recipe):
      raise user_error.UserError(
        f"{before.path} and {site.path} are the same part, and"
        " quantization_rules() have different recipes for them."
      )
  for rule in of_layers:
    if id(rule) not in used:
      raise user_error.UserError(_matches_nothing(rule, sites))
  # Before the layers change: what is exempt is a copy of what they were.
  for rule in rules:
    if isinstance(rule, rules_lib.ExemptLayers):
      _exempt(config, rule)
  for site, rule in chosen.values():
    if rule is not None and rule.recipe is not None:
      _quantize(site, rule.recipe, monitor)


def _sites(config: fdl.Buildable) -> Iterator[_Site]:
  for path, node in tree.nodes(config):
    target, names = fdl.get_callable(node), tree.field_names(node)
    if not tree.is_linen(target):
      continue
    its_roles = products.roles_of(target)
    if _EINSUM in names and tree.value_of(node, _EINSUM) in _PLAIN:
      yield _Site(path, node, _EINSUM, its_roles)
    if _KERNEL in names and products.ATTENTION_PROJECTIONS in its_roles:
      of_kernel = (products.ATTENTION_PRODUCTS,)
      yield _Site(tree.join(path, _KERNEL), node, _KERNEL, of_kernel)


def _quantize(site: _Site, recipe: recipe_lib.Recipe, monitor: bool) -> None:
  # The loss calls a head where nothing can be told, nor recorded.
  told = monitor and products.HEAD not in site.roles
  provider = fdl.Config(quantized.QuantizedEinsum, recipe=recipe, monitor=told)
  if site.field == _EINSUM:
    if products.HEAD in site.roles:
      _check_head(site, recipe)
    site.node.einsum = provider
    return
  kernel: Any = tree.value_of(site.node, _KERNEL)
  if kernel is not kernels.plain:
    name = getattr(kernel, "__name__", None) or type(kernel).__name__
    raise user_error.UserError(
      f"quantization_rules(): {site.path} is {name}, whose products no rule can"
      " reach; set layers.attention.kernels.plain, or leave it out by"
      f" Rule({site.path!r}, None) before."
    )
  site.node.kernel = fdl.Config(kernels.PlainKernel, einsum=provider)


def _check_head(site: _Site, recipe: recipe_lib.Recipe) -> None:
  """Refuses what the loss cannot add up over the chunks of a row."""
  if recipe.is_delayed or quantized.is_stochastic(recipe):
    raise user_error.UserError(
      f"quantization_rules(): {site.path} is a head, which is computed in"
      " chunks without a state or random keys; its recipe must have current"
      " scales and round to the nearest, as recipes.named('fp8_current')."
    )


def _exempt(config: fdl.Buildable, rule: rules_lib.ExemptLayers) -> None:
  stacks = {
    id(node): (path, node)
    for path, node in tree.nodes(config)
    if _is_stack(fdl.get_callable(node))
  }
  if not stacks:
    raise user_error.UserError(
      "quantization_rules(): ExemptLayers matches nothing, because the"
      " configuration has no Stack."
    )
  for path, node in stacks.values():
    target: Any = fdl.get_callable(node)
    if target is edged_stack.EdgedStack:
      raise user_error.UserError(
        "quantization_rules(): ExemptLayers may stand once for the stack"
        f" {path}; give first and last together."
      )
    if target is not stack.Stack:
      raise user_error.UserError(
        f"quantization_rules(): ExemptLayers needs stacks of the class Stack;"
        f" {path} is {target.__name__}, all of whose layers are one program."
      )
    fdl.update_callable(node, edged_stack.EdgedStack)
    node.edge_blocks = copy.deepcopy(node.blocks)
    node.num_first, node.num_last = rule.first, rule.last


def _is_stack(target: Any) -> bool:
  return isinstance(target, type) and issubclass(target, stack.Stack)


def _matches_nothing(rule: rules_lib.Rule, sites: list[_Site]) -> str:
  target = " or ".join(map(repr, rule.targets))
  what = f"quantization_rules(): the rule for {target} matches nothing"
  if any(rule.matches(site.path, site.roles) for site in sites):
    return f"{what} that the rules before it leave; put it before them."
  if not sites:
    return f"{what}, because no layer has a plain einsum or kernel."
  found = sorted({role for site in sites for role in site.roles})
  paths = dict.fromkeys(site.path for site in sites)
  close = suggestions.find_closest(rule.targets[0], paths, count=3)
  shown = close or list(paths)[:3]
  return (
    f"{what}; the roles are {', '.join(found)}, and the closest paths"
    f" {', '.join(shown)}."
  )
