"""Pruning of weights around any optimizer.

Masks are part of the optimizer's state, so they are stored, resumed and sharded
with it, and layers do not know of them: after each update the pruned weights of
the model are zero. Without `straight_through`, a mask stays until its next
update, pruned weights have no gradient, and by their magnitude they stay pruned
(Zhu & Gupta 2017, arXiv 1710.01878).

With `straight_through` the state has the dense weights d, of which the model
has the ones with the largest magnitudes (SR-STE, Zhou et al. 2021, arXiv
2102.04010). With g, the gradient at the model's weights, and m, their mask:

  d <- d + optimizer(g + straight_through (1 - m) d),  p <- m(d) d
"""

from collections.abc import Sequence
import dataclasses
import functools
import re
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import optimizer as optimizer_lib
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
  """N:M sparsity: of each M consecutive weights, the N largest are kept.

  Attributes:
    keep: Weights that are kept in a group, N.
    of: Size of a group, M, which divides the dimension.
    axis: Dimension of the groups in the weights of one layer, that of the
      inputs if hardware is to skip them.
  """

  keep: int = 2
  of: int = 4
  axis: int = 0

  def __post_init__(self) -> None:
    if not 0 < self.keep < self.of:
      raise ValueError(
        "Groups.keep must be between 1 and of - 1, got"
        f" keep={self.keep}, of={self.of}."
      )

  def mask(self, x: jax.Array, sparsity: jax.Array) -> jax.Array:
    """Returns the mask of the weights of one layer; `sparsity` is fixed."""
    del sparsity
    sizes = jnp.moveaxis(jnp.abs(x), self.axis, -1)
    groups = sizes.reshape(*sizes.shape[:-1], -1, self.of)
    kept = _ranks(groups) >= self.of - self.keep
    return jnp.moveaxis(kept.reshape(sizes.shape), -1, self.axis)

  def check(self, name: str, shape: Sequence[int]) -> None:
    """Raises ValueError if weights of this shape have no such groups."""
    size = _size(self, name, shape)
    if size % self.of:
      raise ValueError(
        f"Groups.of ({self.of}) must divide dimension {self.axis} of {name},"
        f" which has size {size}."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
  """Unstructured sparsity: the smallest weights of each layer are pruned."""

  def mask(self, x: jax.Array, sparsity: jax.Array) -> jax.Array:
    """Returns the mask of the weights of one layer, without that share."""
    flat = jnp.abs(x).reshape(-1)
    return _largest(flat, sparsity).reshape(x.shape)

  def check(self, name: str, shape: Sequence[int]) -> None:
    """Accepts all shapes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Channels:
  """Structured sparsity: the channels with the smallest norms are pruned.

  Attributes:
    axis: Dimension of the channels in the weights of one layer.
  """

  axis: int = -1

  def mask(self, x: jax.Array, sparsity: jax.Array) -> jax.Array:
    """Returns the mask of the weights of one layer, without that share."""
    channels = jnp.moveaxis(x, self.axis, -1).reshape(-1, x.shape[self.axis])
    kept = _largest(jnp.linalg.norm(channels, axis=0), sparsity)
    shape = [1] * x.ndim
    shape[self.axis] = -1
    return jnp.broadcast_to(kept.reshape(shape), x.shape)

  def check(self, name: str, shape: Sequence[int]) -> None:
    """Raises ValueError if weights of this shape have no such dimension."""
    _size(self, name, shape)


Structure = Groups | Weights | Channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruningRule:
  """The structure of the pruned weights of some variables.

  Attributes:
    pattern: Regular expression that must match the whole logical name.
    structure: Which weights are pruned together.
  """

  pattern: str
  structure: Structure

  def __post_init__(self) -> None:
    checks.check_pattern("PruningRule.pattern", self.pattern)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruned(optimizer_lib.OptimizerWrapper):
  """An optimizer that prunes weights.

  Masks change with the updates of the steps `first_step`, `first_step +
  every_steps`, and so on until `last_step`; before, all weights are kept. The
  sparsity of `Weights` and `Channels` rises with the masks from
  `initial_sparsity` to `sparsity`, as a polynomial of `exponent`:
  `last_step=first_step` prunes once.

  Attributes:
    optimizer: Optimizer, such as `adamw.AdamW`.
    rules: The first rule whose pattern matches applies; variables without a
      match are not pruned.
    first_step: First step whose update prunes.
    last_step: Last step at which masks may change; None has no end.
    every_steps: Steps between changes of the masks.
    initial_sparsity: Share of pruned weights at `first_step`.
    sparsity: Share of pruned weights from `last_step` on, or always without it.
    exponent: Exponent of the polynomial.
    straight_through: Factor of the decay of pruned weights in SR-STE, such as
      2e-4, which keeps dense weights; None keeps no pruned weight.
  """

  optimizer: optimizer_lib.Optimizer
  rules: Sequence[PruningRule]
  first_step: int = 0
  last_step: int | None = None
  every_steps: int = 1
  initial_sparsity: float = 0.0
  sparsity: float = 0.5
  exponent: float = 3.0
  straight_through: float | None = None

  def __post_init__(self) -> None:
    checks.check_positive(self, "every_steps", "exponent")
    checks.check_non_negative(self, "first_step", "straight_through")
    if not self.rules:
      raise ValueError("Pruned.rules must not be empty.")
    if not 0 <= self.initial_sparsity <= self.sparsity < 1:
      raise ValueError(
        "Pruned needs 0 <= initial_sparsity <= sparsity < 1, got"
        f" {self.initial_sparsity} and {self.sparsity}."
      )
    if self.last_step is not None and self.last_step < self.first_step:
      raise ValueError(
        f"Pruned.last_step ({self.last_step}) must not be before first_step"
        f" ({self.first_step})."
      )

  def sparsity_at(self, step: jax.Array) -> jax.Array:
    """Returns the share of weights that a mask of this step prunes."""
    if self.last_step is None or self.last_step == self.first_step:
      return jnp.full(jnp.shape(step), self.sparsity, jnp.float32)
    whole = self.last_step - self.first_step
    done = jnp.clip((step - self.first_step) / whole, 0.0, 1.0)
    missing = self.initial_sparsity - self.sparsity
    return self.sparsity + missing * (1 - done) ** self.exponent

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule.

    Raises:
      ValueError: `specs` is None, a rule matches no variable, or a variable has
        no such structure.
    """
    if specs is None:
      raise ValueError(
        "Pruned.rules need the specs of the variables, because patterns match"
        " their names."
      )
    structures = self._structures(specs)
    inner = self.optimizer.transform(specs)

    def init(params: Any) -> PrunedState:
      pruned = _select(params, structures)
      ones = jax.tree.map(lambda p: jnp.ones(p.shape, bool), pruned)
      dense: Any = ()
      if self.straight_through is not None:
        # Copies, because a step donates both buffers.
        dense = jax.tree.map(
          lambda p: jnp.array(p, jnp.float32, copy=True), pruned
        )
      count = jnp.zeros((), jnp.int32)
      return PrunedState(count, ones, dense, inner.init(params))

    def update(
      updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, PrunedState]:
      weights = _select(params, structures)
      dense = self._dense(weights, state)
      gradients = self._gradients(_select(updates, structures), dense, state)
      updates, inner_state = inner.update(
        _replace(updates, gradients), state.inner, _replace(params, dense)
      )
      dense = jax.tree.map(
        lambda d, u: d.astype(jnp.float32) + u,
        dense,
        _select(updates, structures),
      )
      masks = self._masks(dense, state, structures)
      changes = jax.tree.map(
        lambda mask, d, p: jnp.where(mask, d, 0.0) - p.astype(jnp.float32),
        masks,
        dense,
        weights,
      )
      return _replace(updates, changes), PrunedState(
        optax.safe_increment(state.count),
        masks,
        () if self.straight_through is None else dense,
        inner_state,
      )

    return optimizer_lib.with_standard_promotion(
      optax.GradientTransformation(init, update)
    )

  def _dense(self, weights: Any, state: "PrunedState") -> Any:
    """Returns the dense weights before an update."""
    if self.straight_through is None:
      return weights
    # The parameters may have been replaced since the initial state.
    return jax.tree.map(
      lambda d, p: jnp.where(state.count == 0, p, d), state.dense, weights
    )

  def _gradients(self, gradients: Any, dense: Any, state: "PrunedState") -> Any:
    """Returns the gradients of the weights that the optimizer updates."""
    decay = self.straight_through
    if decay is None:
      return jax.tree.map(
        lambda g, mask: jnp.where(mask, g, 0), gradients, state.masks
      )
    return jax.tree.map(
      lambda g, mask, d: g + jnp.where(mask, 0, decay * d),
      gradients,
      state.masks,
      dense,
    )

  def _masks(
    self, dense: Any, state: "PrunedState", structures: "_Structures"
  ) -> Any:
    """Returns the masks after an update, of the weights after it."""
    since = state.count - self.first_step
    changes = (since >= 0) & (since % self.every_steps == 0)
    if self.last_step is not None:
      changes &= state.count <= self.last_step
    sparsity = self.sparsity_at(state.count)
    flat: Any = traverse_util.flatten_dict(dense)

    def make(x: jax.Array, path: tuple[str, ...]) -> jax.Array:
      structure, num_stacked = structures[path]
      mask = functools.partial(structure.mask, sparsity=sparsity)
      for _ in range(num_stacked):
        mask = jax.vmap(mask)
      return mask(x)

    def remake(_: Any) -> Any:
      made = {path: make(x, path) for path, x in flat.items()}
      return traverse_util.unflatten_dict(made)

    return jax.lax.cond(changes, remake, lambda masks: masks, state.masks)

  def _structures(self, specs: variable_groups.Specs) -> "_Structures":
    found: _Structures = {}
    used: set[int] = set()
    flat: Any = traverse_util.flatten_dict(specs)
    for path, spec in flat.items():
      for i, rule in enumerate(self.rules):
        if re.fullmatch(rule.pattern, spec.name):
          rule.structure.check(spec.name, spec.layer_shape)
          found[path] = rule.structure, len(spec.stacked)
          used.add(i)
          break
    for i, rule in enumerate(self.rules):
      if i not in used:
        first = next(iter(flat.values()), None)
        raise ValueError(
          f"Pruned.rules: {rule.pattern!r} matches no variable that earlier"
          " rules leave; it must match a whole name"
          f"{f', such as {first.name!r}' if first else ''}."
        )
    return found


class PrunedState(NamedTuple):
  """The state of pruning around that of the optimizer.

  Attributes:
    count: int32 scalar, the number of updates.
    masks: bool, of the pruned variables: which weights are kept.
    dense: float32 weights of the pruned variables, with `straight_through`;
      otherwise empty.
    inner: State of the optimizer.
  """

  count: Any
  masks: Any
  dense: Any
  inner: Any


# Structure and number of stacked axes of each pruned variable, by path.
_Structures = dict[tuple[str, ...], tuple[Structure, int]]


def _select(tree: Any, structures: _Structures) -> Any:
  """Returns the leaves of pruned variables."""
  flat = traverse_util.flatten_dict(tree)
  return traverse_util.unflatten_dict({k: flat[k] for k in structures})


def _replace(tree: Any, pruned: Any) -> Any:
  """Returns a tree with other leaves for pruned variables."""
  flat = traverse_util.flatten_dict(tree)
  return traverse_util.unflatten_dict(
    {**flat, **traverse_util.flatten_dict(pruned)}
  )


def _size(structure: Any, name: str, shape: Sequence[int]) -> int:
  """Returns the size of the dimension `structure.axis`."""
  axis, rank = structure.axis, len(shape)
  if not -rank <= axis < rank:
    raise ValueError(
      f"{type(structure).__name__}.axis ({axis}) must be a dimension of {name},"
      f" which has {rank} in a layer."
    )
  return shape[axis]


def _ranks(x: jax.Array) -> jax.Array:
  """Returns the ranks of values along the last axis; the smallest has 0."""
  order = jnp.argsort(x, axis=-1, stable=True)
  return jnp.argsort(order, axis=-1, stable=True)


def _largest(x: jax.Array, sparsity: jax.Array) -> jax.Array:
  """Returns which of [N] values are kept: not the smallest of that share."""
  pruned = jnp.round(sparsity * x.size)
  return _ranks(x).astype(jnp.float32) >= pruned
