"""Rewrites of a configuration: compute dtype, KV-cache storage, quantization.

Each sets fields that the experiment left unset, in place. Import this module
lazily: it loads jax and the layers that it looks for.
"""

from collections.abc import Iterator, Sequence
import copy
import dataclasses
from typing import Any

import fiddle as fdl
from flax import linen as nn
from jax import numpy as jnp

from paxon.layers import embedding, ghost_norms, precision
from paxon.layers.attention import kernels, quantized_rows
from paxon.layers.moe import dispatch, mixture
from paxon.layers.stacks import edged_stack, stack
from paxon.learners import privacy, skipping
from paxon.quantization import einsum as quantized
from paxon.quantization import lora as lora_lib
from paxon.quantization import matmuls, served_einsum, stored_kernels
from paxon.quantization import recipe as recipe_lib
from paxon.quantization import rules as rules_lib
from paxon.runner import user_error
from paxon.runner.configuration import annotations, tree
from paxon.runner.settings import adapters
from paxon.runner.settings import quantization as quantization_settings
from paxon.sharding import suggestions

# JAX truncates float64, and 8-bit formats need scales (see `quantization`).
_COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
# Without it, autotuning decides whether GPUs run fp8 and int8 kernels.
_QUANTIZED_OPTION_SET = "cublas_products"
_CACHE, _STORAGE = "cache", "storage"
_EINSUM, _KERNEL = "einsum", "kernel"
# Contractions that a quantized einsum can replace.
_PLAIN = (jnp.einsum, precision.wide_einsum, precision.rounded_einsum)


def check_dtypes(config: fdl.Buildable) -> None:
  """Raises UserError for an unsupported `dtype` or `param_dtype`."""
  for path, node in tree.nodes(config):
    if not tree.is_linen(fdl.get_callable(node)):
      continue
    for field in ("dtype", "param_dtype"):
      value = tree.get_value(node, field) if tree.is_set(node, field) else None
      if value is None:
        continue
      name = annotations.to_dtype(value).name
      if name not in _COMPUTE_DTYPES:
        raise user_error.UserError(
          f"{tree.join(path, field)} must be {', '.join(_COMPUTE_DTYPES[:-1])}"
          f" or {_COMPUTE_DTYPES[-1]}, got {name}."
        )


def skip_non_finite(config: fdl.Buildable) -> None:
  """Makes the learner of a job skip updates that are not finite, in place."""
  for learner in _list_learners(config):
    if learner.skip is None:
      learner.skip = fdl.Config(skipping.SkipUpdates)


def _list_learners(config: fdl.Buildable) -> list[Any]:
  """Returns the learner of a job, or those of its groups."""
  learner = config.task.learner
  if "groups" in tree.field_names(learner):
    return [group.learner for group in learner.groups]
  return [learner]


def set_dtype(config: fdl.Buildable, dtype: str) -> list[str]:
  """Sets the unset field `dtype` of every configured class, in place.

  A field that was set, even to None, and the `dtype` of functions (such as
  initializers) are kept.

  Returns:
    The paths of the nodes that were changed.
  """
  value = annotations.to_dtype(dtype)
  changed = []
  for path, node in tree.nodes(config):
    if not isinstance(fdl.get_callable(node), type):
      continue
    if "dtype" in tree.field_names(node) and not tree.is_set(node, "dtype"):
      node.dtype = value
      changed.append(path)
  return changed


def set_kv_cache_storage(config: fdl.Buildable, name: str) -> list[str]:
  """Sets the unset storage of every KV cache, in place.

  An unset cache becomes a configuration of its default. Caches without a
  storage (`NoCache`) are skipped.

  Returns:
    The paths of the storages that were set.

  Raises:
    ValueError: The format does not exist.
  """
  quantized_rows.QuantizedRows(name)
  changed = []
  for path, node in tree.nodes(config):
    fields = tree.field_names(node)
    default = tree.get_value(node, _CACHE) if _CACHE in fields else None
    if isinstance(default, nn.Module) and not tree.is_set(node, _CACHE):
      if _STORAGE not in {field.name for field in dataclasses.fields(default)}:
        continue
      node.cache = tree.to_config(default, omit=(_STORAGE,))
      path, node = tree.join(path, _CACHE), node.cache
      fields = tree.field_names(node)
    if _STORAGE in fields and not tree.is_set(node, _STORAGE):
      node.storage = fdl.Config(quantized_rows.QuantizedRows, name)
      changed.append(tree.join(path, _STORAGE))
  return changed


@dataclasses.dataclass(frozen=True)
class _Site:
  """A field whose matmuls can be quantized.

  Attributes:
    path: As rules name it: path of the layer, or of an attention's kernel.
    node: The layer.
    field: `einsum` or `kernel`.
    roles: Roles of the matmuls.
  """

  path: str
  node: fdl.Buildable
  field: str
  roles: tuple[str, ...]


def quantize(
  config: fdl.Buildable, rules: rules_lib.Rules, *, monitor: bool = False
) -> None:
  """Quantizes layers by rules, in place.

  Every layer with a plain `einsum`, and every attention with the plain kernel,
  gets its own `QuantizedEinsum` with the recipe of the first matching rule.

  Raises:
    user_error.UserError: A rule has no effect, a matched layer cannot be
      quantized, or a shared node gets several recipes.
  """
  for path, node in tree.nodes(config):
    if fdl.get_callable(node) is lora_lib.LoraEinsum:
      raise user_error.UserError(
        f"quantization_rules(): {path} is a low-rank adapter, whose layer"
        " cannot be trained in low precision. Train without quantization, and"
        " then convert: --mode=eval --fdl.quantization=RECIPE:convert merges"
        " the adapters; frozen_storage quantizes the frozen kernels."
      )
  sites = list(_find_sites(config))
  chosen: dict[tuple[int, str], tuple[_Site, rules_lib.Rule | None]] = {}
  used: set[int] = set()
  layer_rules = [r for r in rules if isinstance(r, rules_lib.Rule)]
  for site in sites:
    rule = next(
      (r for r in layer_rules if r.matches(site.path, site.roles)), None
    )
    if rule is not None:
      used.add(id(rule))
    key = (id(site.node), site.field)
    before, other = chosen.setdefault(key, (site, rule))
    if (rule and rule.recipe) != (other and other.recipe):
      raise user_error.UserError(
        f"{before.path} and {site.path} are the same module, but"
        " quantization_rules() give them different recipes."
      )
  for rule in layer_rules:
    if id(rule) not in used:
      raise user_error.UserError(_explain_unused(rule, sites))
  # First, because exempt layers are copies of the unquantized ones.
  for rule in rules:
    if isinstance(rule, rules_lib.ExemptLayers):
      _exempt(config, rule)
  dropless = _find_dropless_experts(config)
  for site, rule in chosen.values():
    if rule is not None and rule.recipe is not None:
      _quantize_site(site, rule.recipe, monitor)
      if id(site.node) in dropless and "notes" in tree.field_names(config):
        _note_grouped(config, rule.recipe)
  has_state = any(
    rule is not None
    and rule.recipe is not None
    and rule.recipe.is_delayed
    and id(site.node) not in dropless
    for site, rule in chosen.values()
  )
  start = None
  if "warm_start" in tree.field_names(config):
    start = tree.get_value(config, "warm_start")
  if has_state and isinstance(start, fdl.Config):
    # Without stored histories of scales, as in an imported model, they start
    # empty.
    pattern = f"{quantized.COLLECTION}/.*"
    start.may_be_missing = (*start.may_be_missing, pattern)


def adapt(
  config: fdl.Buildable,
  rules: Sequence[lora_lib.LoraRule],
  *,
  storage: stored_kernels.Storage | None = None,
) -> tuple[str, ...]:
  """Adds low-rank adapters to layers by rules, in place.

  Args:
    config: The configuration.
    rules: The adapters.
    storage: Format of the kernels of these layers, and of experts that no rule
      matches; None keeps parameters.

  Returns:
    Patterns of the names of the adapters' variables; each matches at least one.

  Raises:
    user_error.UserError: A rule matches no layer with kernels, or a head.
  """
  sites = [site for site in _find_sites(config) if site.field == _EINSUM]
  patterns: dict[str, None] = {}
  used: set[int] = set()
  for site in sites:
    rule = next((r for r in rules if r.matches(site.path, site.roles)), None)
    if rule is None:
      if storage is not None and matmuls.EXPERTS in site.roles:
        site.node.einsum = fdl.Config(
          lora_lib.LoraEinsum, lora=None, storage=storage
        )
      continue
    used.add(id(rule))
    if rule.lora is None:
      continue
    if {matmuls.HEAD, matmuls.EMBEDDING} & set(site.roles):
      raise user_error.UserError(
        f"adapter_rules(): {site.path} is an embedding or a head, which cannot"
        f" have an adapter; exclude it with an earlier LoraRule({site.path!r},"
        " None)."
      )
    site.node.einsum = fdl.Config(
      lora_lib.LoraEinsum, lora=rule.lora, matmuls=rule.matmuls
    )
    if storage is not None:
      site.node.einsum.storage = storage
    for name in rule.matmuls or (None,):
      within = "" if name is None else f".*/einsum/{name}"
      patterns[within + lora_lib.PATTERN.removeprefix(".*" * bool(name))] = None
  for rule in rules:
    if id(rule) not in used:
      unused = rules_lib.Rule(rule.target, None)
      text = _explain_unused(unused, sites)
      raise user_error.UserError(text.replace("quantization_", "adapter_"))
  return tuple(patterns)


def find_adapter(config: fdl.Buildable) -> lora_lib.Lora:
  """Returns the adapter of all layers of a configuration that have one.

  Raises:
    user_error.UserError: Layers have different adapters.
  """
  found = {
    value
    for _, node in tree.nodes(config)
    if fdl.get_callable(node) is lora_lib.LoraEinsum
    and (value := tree.get_value(node, "lora")) is not None
  }
  if len(found) != 1:
    raise user_error.UserError(
      f"adapter_rules() has {len(found)} different adapters, and only one can"
      " be merged."
    )
  return found.pop()


def add_note(config: fdl.Buildable, note: str) -> None:
  """Adds a line to those that a job prints when training starts, in place."""
  config.notes = (*config.notes, note)


def use_ghost_norms(config: fdl.Buildable) -> None:
  """Gives layers ghost norms if the learner of a job clips by them, in place.

  Every plain `einsum` becomes a `GhostEinsum`, and every `lookup` of a table a
  `GhostLookup`.
  """
  uses_ghosts = [
    learner.privacy is not None
    and learner.privacy.clipping is privacy.Clipping.GHOST
    for learner in _list_learners(config)
  ]
  if not any(uses_ghosts):
    return
  for site in _find_sites(config):
    if site.field == _EINSUM:
      site.node.einsum = fdl.Config(ghost_norms.GhostEinsum)
  for _, node in tree.nodes(config):
    if fdl.get_callable(node) is embedding.Embedding:
      lookup = tree.get_value(node, "lookup")
      node.lookup = fdl.Config(ghost_norms.GhostLookup, lookup=lookup)


def adapt_job(
  config: fdl.Buildable,
  rules: Sequence[lora_lib.LoraRule],
  knobs: adapters.AdapterKnobs,
  quantization: quantization_settings.QuantizationKnobs,
) -> None:
  """Adds low-rank adapters to a job, which trains them alone, in place.

  A job that converts or serves quantized weights merges them instead.

  Args:
    config: The configuration of the job.
    rules: The adapters; none adds nothing.
    knobs: Knobs of the storage of frozen variables.
    quantization: Knobs of quantization.

  Raises:
    user_error.UserError: See `adapt`; or kernels without adapters would be
      stored quantized.
  """
  storage = knobs.frozen_storage
  use_ghost_norms(config)
  if quantization_settings.serves(quantization):
    config.merges_adapters = bool(rules)
    return
  is_quantized = storage not in (None, "dtype")
  if not rules:
    if is_quantized:
      raise user_error.UserError(
        f"frozen_storage = {storage!r} requires adapters; set lora_rank."
      )
    return
  experts = [
    site
    for site in _find_sites(config)
    if matmuls.EXPERTS in site.roles
    and not any(r.matches(site.path, site.roles) for r in rules)
  ]
  patterns = adapt(
    config,
    rules,
    storage=stored_kernels.Storage(storage) if is_quantized else None,
  )
  if experts:
    add_note(
      config,
      "adapters: attention and dense feed-forward layers; kernels of experts"
      " have none (--fdl.lora_experts=True adapts them too)",
    )
  if config.trainable is None:
    config.trainable = patterns
  start = config.warm_start
  if isinstance(start, fdl.Config):
    start.may_be_missing = (*start.may_be_missing, lora_lib.PATTERN)


def _find_sites(config: fdl.Buildable) -> Iterator[_Site]:
  for path, node in tree.nodes(config):
    target, names = fdl.get_callable(node), tree.field_names(node)
    if not tree.is_linen(target):
      continue
    layer_roles = matmuls.get_roles(target)
    if _EINSUM in names and tree.get_value(node, _EINSUM) in _PLAIN:
      yield _Site(path, node, _EINSUM, layer_roles)
    if _KERNEL in names and matmuls.ATTENTION_PROJECTIONS in layer_roles:
      kernel_roles = (matmuls.ATTENTION_MATMULS,)
      yield _Site(tree.join(path, _KERNEL), node, _KERNEL, kernel_roles)


def _quantize_site(
  site: _Site, recipe: recipe_lib.Recipe, monitor: bool
) -> None:
  # The loss calls the head in a context that cannot record summaries.
  is_monitored = monitor and matmuls.HEAD not in site.roles
  provider = fdl.Config(
    quantized.QuantizedEinsum, recipe=recipe, monitor=is_monitored
  )
  if site.field == _EINSUM:
    if matmuls.HEAD in site.roles:
      _check_head(site, recipe)
    site.node.einsum = provider
    return
  kernel: Any = tree.get_value(site.node, _KERNEL)
  if kernel not in (kernels.plain, kernels.auto):
    name = getattr(kernel, "__name__", None) or type(kernel).__name__
    raise user_error.UserError(
      f"quantization_rules(): {site.path} is {name}, whose matmuls cannot be"
      " quantized; set layers.attention.kernels.auto, or exclude it with an"
      f" earlier Rule({site.path!r}, None)."
    )
  site.node.kernel = fdl.Config(kernels.PlainKernel, einsum=provider)


def _find_dropless_experts(config: fdl.Buildable) -> set[int]:
  """Returns the ids of the nodes of experts whose matmuls are grouped."""
  found = set()
  for _, node in tree.nodes(config):
    if fdl.get_callable(node) is not mixture.MixtureOfExperts:
      continue
    form: Any = tree.get_value(node, "dispatch")
    if isinstance(form, fdl.Buildable):
      is_dropless = fdl.get_callable(form) is dispatch.Dropless
    else:
      is_dropless = isinstance(form, dispatch.Dropless)
    if is_dropless:
      found.add(id(node.experts))
  return found


def _note_grouped(config: fdl.Buildable, recipe: recipe_lib.Recipe) -> None:
  """Notes what quantization does not cover in grouped matmuls."""
  what = "quantization: the grouped matmuls of experts"
  if not quantized.is_grouped(recipe):
    note = (
      f"{what} stay in the dtype of the layer, because they have no scales of"
      " blocks; another recipe or a dispatch by capacity quantizes them"
    )
  elif recipe.lhs is None:
    return
  else:
    note = (
      f"{what} round operands to 8 bits, with current scales of each expert and"
      " token, and multiply them in the dtype of the layer: no grouped kernel"
      " takes 8-bit operands"
    )
  if note not in config.notes:
    add_note(config, note)


def _check_head(site: _Site, recipe: recipe_lib.Recipe) -> None:
  """Rejects recipes with state: the loss computes the head in chunks."""
  if recipe.is_delayed or quantized.is_stochastic(recipe):
    raise user_error.UserError(
      f"quantization_rules(): {site.path} is a head, which is computed in"
      " chunks without state or random keys; its recipe must use current scales"
      " and round to nearest, such as recipes.find_recipe('fp8_current')."
    )


def _exempt(config: fdl.Buildable, rule: rules_lib.ExemptLayers) -> None:
  stacks = {
    id(node): (path, node)
    for path, node in tree.nodes(config)
    # Modules of further tokens are no first or last layer.
    if _is_stack(fdl.get_callable(node)) and ".multi_token." not in path
  }
  if not stacks:
    raise user_error.UserError(
      "quantization_rules(): ExemptLayers has no effect, because the"
      " configuration has no Stack."
    )
  for path, node in tree.nodes(config):
    if fdl.get_callable(node) is stack.Stacks:
      raise user_error.UserError(
        "quantization_rules(): ExemptLayers requires one Stack, but"
        f" {path} has several; exempt blocks with a Rule."
      )
  for path, node in stacks.values():
    target: Any = fdl.get_callable(node)
    if target is edged_stack.EdgedStack:
      raise user_error.UserError(
        f"quantization_rules(): only one ExemptLayers can apply to the stack"
        f" {path}; set first and last in one rule."
      )
    if target is not stack.Stack:
      raise user_error.UserError(
        "quantization_rules(): ExemptLayers requires class Stack, but"
        f" {path} is {target.__name__}, which runs all layers as one program."
      )
    fdl.update_callable(node, edged_stack.EdgedStack)
    node.edge_blocks = copy.deepcopy(node.blocks)
    node.num_first, node.num_last = rule.first, rule.last


def _is_stack(target: Any) -> bool:
  return isinstance(target, type) and issubclass(target, stack.Stack)


def _explain_unused(rule: rules_lib.Rule, sites: list[_Site]) -> str:
  target = " or ".join(map(repr, rule.targets))
  what = f"quantization_rules(): the rule for {target}"
  if any(rule.matches(site.path, site.roles) for site in sites):
    return f"{what} has no effect: earlier rules match all its layers."
  if not sites:
    return f"{what} matches nothing: no layer has a plain einsum or kernel."
  found = sorted({role for site in sites for role in site.roles})
  paths = dict.fromkeys(site.path for site in sites)
  close = suggestions.find_closest(rule.targets[0], paths, count=3)
  shown = close or list(paths)[:3]
  return (
    f"{what} matches nothing; the roles are {', '.join(found)}, and the closest"
    f" paths {', '.join(shown)}."
  )


def quantize_job(
  config: fdl.Buildable,
  rules: rules_lib.Rules,
  knobs: quantization_settings.QuantizationKnobs,
) -> None:
  """Quantizes the layers of a job, as its knobs say, in place.

  Raises:
    user_error.UserError: See `quantize` and `serve_quantized_weights`.
  """
  if rules:
    quantize(config, rules, monitor=knobs.quantization_monitor)
  if quantization_settings.serves(knobs):
    serve_quantized_weights(config)
    config.weights = knobs.quantization
  elif rules:
    sets = config.compiler_option_sets
    config.compiler_option_sets = (*sets, _QUANTIZED_OPTION_SET)


def serve_quantized_weights(config: fdl.Buildable) -> list[str]:
  """Replaces quantized einsums by einsums of stored quantized weights.

  Matmuls without weights (inside attention) and the head are computed in the
  layer's dtype.

  Call it after `quantize`.

  Returns:
    The paths of the layers with stored weights.

  Raises:
    user_error.UserError: No layer has weights to store, or only some layers of
      a stack do.
  """
  changed = []
  for path, node in list(tree.nodes(config)):
    if fdl.get_callable(node) is kernels.PlainKernel:
      continue
    for field in (_EINSUM, _KERNEL):
      value = node.__arguments__.get(field)
      if not isinstance(value, fdl.Buildable):
        continue
      target = fdl.get_callable(value)
      if target is kernels.PlainKernel:
        node.kernel = kernels.auto
      elif target is quantized.QuantizedEinsum:
        if matmuls.HEAD in matmuls.get_roles(fdl.get_callable(node)):
          node.einsum = precision.wide_einsum
          continue
        recipe = served_einsum.serving_recipe(value.recipe)
        node.einsum = fdl.Config(served_einsum.ServedEinsum, recipe=recipe)
        changed.append(path)
  if not changed:
    raise user_error.UserError(
      "quantization: no layer has weights that can be stored quantized; the"
      " rules must include attention_projections, feed_forward or experts."
    )
  _check_served_stacks(config, changed)
  return changed


def keep_trained_ranges(config: fdl.Buildable) -> bool:
  """Makes stored weights keep the ranges of training, in place.

  Training rounds within the largest magnitude of a group, to which it has
  adapted the weights; a searched range would round them otherwise.

  Returns:
    Whether there was a range to search.
  """
  found = False
  for _, node in tree.nodes(config):
    if fdl.get_callable(node) is served_einsum.ServedEinsum:
      found |= node.recipe.search_range
      node.recipe = dataclasses.replace(node.recipe, search_range=False)
  return found


def _check_served_stacks(config: fdl.Buildable, changed: Sequence[str]) -> None:
  """Rejects stacks with quantized and other layers, which share arrays."""
  for path, node in tree.nodes(config):
    if fdl.get_callable(node) is not edged_stack.EdgedStack:
      continue
    blocks = tree.join(path, "blocks")
    if any(layer.startswith(f"{blocks}[") for layer in changed):
      raise user_error.UserError(
        f"quantization: the layers of {path} share their arrays, so all or none"
        " can be served quantized; remove ExemptLayers from"
        " quantization_rules() for :serve and :convert, or exempt the blocks"
        " with a Rule."
      )
