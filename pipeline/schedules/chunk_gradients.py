"""Forward and backward operations of one chunk of a model.

Backward operations either recompute the forward pass from the chunk's input, or
read residuals that the forward operation saved. To save residuals, the forward
and backward pass are traced once (a jaxpr), and the forward operation runs the
equations that its output depends on; of their results it returns those that the
backward pass needs. Equations that depend only on variables and the microbatch
(a cast or transposed kernel, a mask, dropout's bits) are computed again, so the
weights of an unrolled stack are never saved. A loop (`lax.scan`) is one
equation: whatever it saves for its backward pass is a residual, including
kernels cast to bfloat16.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core as jax_core
import jax.numpy as jnp

from paxon.pipeline.schedules import model_functions, table

_Tree = model_functions.Tree


class Operands(NamedTuple):
  """Operands shared by the operations of one chunk.

  Attributes:
    functions: The model.
    outer: Variables of `first` and `last`.
    context: The microbatch and the virtual stage.
    is_first: Whether the chunk is the model's first virtual stage, bool.
    residuals: Values that the forward operation saved.
  """

  functions: model_functions.ModelFunctions
  outer: _Tree
  context: model_functions.Context
  is_first: jax.Array
  residuals: Sequence[jax.Array] = ()


class Results(NamedTuple):
  """Results of an operation; zeros for those that it does not compute.

  Attributes:
    message: For another chunk, like x.
    auxiliary: Added to the loss, float32.
    chunk: Gradients of the chunk's variables, float32.
    residuals: To be saved.
  """

  message: _Tree
  auxiliary: jax.Array
  chunk: _Tree
  residuals: Sequence[jax.Array] = ()


# `(operands, variables of the chunk, x, dy) -> results`.
Run = Callable[[Operands, _Tree, _Tree, _Tree], Results]


def idle(given: Operands, chunk: _Tree, x: _Tree, dy: _Tree) -> Results:
  """Returns zeros, for an empty slot of the table."""
  del dy
  zeros = _zeros_float32(chunk)
  return Results(_zeros(x), jnp.float32(0), zeros, _zeros(given.residuals))


def _forward(given: Operands, chunk: _Tree, x: _Tree, dy: _Tree) -> Results:
  del dy
  x = _input(given, x)
  y, auxiliary = given.functions.chunk(chunk, x, given.context)
  return Results(y, auxiliary.astype(jnp.float32), _zeros_float32(chunk))


def _backward(given: Operands, chunk: _Tree, x: _Tree, dy: _Tree) -> Results:
  def run(chunk: _Tree, x: _Tree) -> tuple[_Tree, jax.Array]:
    return given.functions.chunk(chunk, x, given.context)

  with jax.named_scope("rematted_computation"):
    (_, auxiliary), pull = jax.vjp(run, chunk, _input(given, x))
  gradients, dx = pull((dy, jnp.ones_like(auxiliary)))
  return Results(dx, jnp.float32(0), _as_float32(gradients))


# Backward operations that run the forward pass again.
RECOMPUTING: Mapping[table.Kind, Run] = {
  table.Kind.FORWARD: _forward,
  table.Kind.BACKWARD: _backward,
}


def make_saving(split: "Split") -> Mapping[table.Kind, Run]:
  """Returns operations that save and read residuals."""

  def forward(given: Operands, chunk: _Tree, x: _Tree, dy: _Tree) -> Results:
    del dy
    free = (chunk, given.context)
    (y, auxiliary), residuals = split.forward(free, _input(given, x))
    auxiliary = auxiliary.astype(jnp.float32)
    return Results(y, auxiliary, _zeros_float32(chunk), residuals)

  def backward(given: Operands, chunk: _Tree, x: _Tree, dy: _Tree) -> Results:
    del x
    free = (chunk, given.context)
    gradients, dx = split.backward(free, given.residuals, dy)
    none = [jnp.zeros(s.shape, s.dtype) for s in split.residuals]
    return Results(dx, jnp.float32(0), _as_float32(gradients), none)

  return {table.Kind.FORWARD: forward, table.Kind.BACKWARD: backward}


def head(
  given: Operands, y: _Tree
) -> tuple[tuple[jax.Array, _Tree], _Tree, _Tree]:
  """Returns (loss, metrics), and gradients of `y` and of `outer`."""

  def run(y: _Tree, outer: _Tree) -> tuple[jax.Array, _Tree]:
    return given.functions.last(outer, y, given.context)

  loss, pull, metrics = jax.vjp(run, y, given.outer, has_aux=True)
  dy, outer = pull(jnp.ones_like(loss))
  return (loss.astype(jnp.float32), metrics), dy, _as_float32(outer)


def first(given: Operands, dx: _Tree) -> _Tree:
  """Returns gradients of `outer` by the input of the model's first chunk."""

  def run(outer: _Tree) -> _Tree:
    return given.functions.first(outer, given.context)

  _, pull = jax.vjp(run, given.outer)
  (outer,) = pull(dx)
  return _as_float32(outer)


def _as_float32(tree: _Tree) -> _Tree:
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _input(given: Operands, x: _Tree) -> _Tree:
  """Returns the input of the chunk: received, or made by `first`."""
  return lax.cond(
    given.is_first,
    lambda: given.functions.first(given.outer, given.context),
    lambda: x,
  )


def _zeros(tree: _Tree) -> _Tree:
  return jax.tree.map(jnp.zeros_like, tree)


def _zeros_float32(tree: _Tree) -> _Tree:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


# Equations that only call others, by their names in two versions of JAX.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
  """Forward and backward pass as two functions; `free` are (variables, others).

  Attributes:
    forward: `(free, x) -> (y, auxiliary), residuals`.
    backward: `(free, residuals, dy) -> gradients of the variables, dx`.
    residuals: Shapes of the values that `forward` saves.
  """

  forward: Callable[[_Tree, _Tree], tuple[_Tree, list[jax.Array]]]
  backward: Callable[[_Tree, Sequence[jax.Array], _Tree], tuple[_Tree, _Tree]]
  residuals: list[jax.ShapeDtypeStruct]


def split(
  function: Callable[[_Tree, _Tree, _Tree], tuple[_Tree, jax.Array]],
  *,
  variables: _Tree,
  others: _Tree,
  x: _Tree,
) -> Split:
  """Returns forward and backward pass of a function that share residuals.

  Args:
    function: `(variables, others, x) -> (y, auxiliary)`; `y` is like `x`, and
      the gradient of `auxiliary` is one.
    variables: Differentiated, or their shapes.
    others: Other arguments, without gradients.
    x: Its input.
  """

  def both(free: _Tree, x: _Tree, dy: _Tree) -> Any:
    variables, others = free
    (y, auxiliary), pull = jax.vjp(
      lambda variables, x: function(variables, others, x), variables, x
    )
    return (y, auxiliary), pull((dy, jnp.ones_like(auxiliary)))

  given = ((variables, others), x, x)
  closed, shapes = jax.make_jaxpr(both, return_shape=True)(*given)
  closed = _inline(closed)
  jaxpr = closed.jaxpr
  num_free, num_x = (len(jax.tree.leaves(tree)) for tree in given[:2])
  free_in = jaxpr.invars[:num_free]
  x_in = jaxpr.invars[num_free : num_free + num_x]
  dy_in = jaxpr.invars[num_free + num_x :]
  trees = [jax.tree.structure(tree) for tree in shapes]
  count = trees[0].num_leaves
  ends = jaxpr.outvars[:count], jaxpr.outvars[count:]

  eqns, _ = _find_needed(jaxpr, ends[0], have=set())
  computed = {*x_in} | _depending(eqns, {*x_in})
  backward_eqns, residuals = _find_needed(jaxpr, ends[1], have=computed)
  forward_jaxpr = jaxpr.replace(
    invars=[*free_in, *x_in], eqns=eqns, outvars=[*ends[0], *residuals]
  )
  backward_jaxpr = jaxpr.replace(
    invars=[*free_in, *residuals, *dy_in], eqns=backward_eqns, outvars=ends[1]
  )

  def run(jaxpr: Any, inputs: _Tree) -> list[Any]:
    return jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(inputs))

  def forward(free: _Tree, x: _Tree) -> Any:
    made = run(forward_jaxpr, (free, x))
    return jax.tree.unflatten(trees[0], made[:count]), made[count:]

  def backward(free: _Tree, saved: Sequence[jax.Array], dy: _Tree) -> Any:
    made = run(backward_jaxpr, (free, list(saved), dy))
    return jax.tree.unflatten(trees[1], made)

  return Split(
    forward=forward,
    backward=backward,
    residuals=[
      jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in residuals
    ],
  )


def _inline(closed: Any) -> Any:
  """Returns a jaxpr without calls, whose equations keep their names."""

  def run(closed: Any, inputs: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    env |= zip(jaxpr.constvars, closed.consts, strict=True)

    def read(atom: Any) -> Any:
      return atom.val if isinstance(atom, jax_core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
      given = [read(atom) for atom in eqn.invars]
      primitive, params = eqn.primitive, eqn.params
      name = str(eqn.source_info.name_stack)
      scope = jax.named_scope(name) if name else contextlib.nullcontext()
      # The context is that of the trace, such as host compute.
      with scope, eqn.ctx.manager:
        if primitive.name in _CALLS:
          made = run(params.get("jaxpr", params.get("call_jaxpr")), given)
        else:
          made = primitive.bind(*given, **primitive.get_bind_params(params))
          made = made if primitive.multiple_results else [made]
      env.update(zip(eqn.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  return jax.make_jaxpr(lambda *inputs: run(closed, inputs))(*closed.in_avals)


def _find_needed(
  jaxpr: Any, outputs: Sequence[Any], *, have: set[Any]
) -> tuple[list[Any], list[Any]]:
  """Returns the equations that outputs depend on, and the values they use.

  Returns:
    Equations in order, and the values of `have` that they or the outputs use.
  """
  used = _variables(outputs)
  needed = []
  for eqn in reversed(jaxpr.eqns):
    if any(v in used and v not in have for v in eqn.outvars):
      needed.append(eqn)
      used |= _variables(eqn.invars)
  return needed[::-1], [v for v in used if v in have]


def _depending(eqns: Sequence[Any], on: set[Any]) -> set[Any]:
  """Returns the results of equations that depend on some values."""
  found = set(on)
  for eqn in eqns:
    if not found.isdisjoint(_variables(eqn.invars)):
      found.update(eqn.outvars)
  return found


def _variables(atoms: Sequence[Any]) -> dict[Any, None]:
  """Returns the unique variables that are not literals, in order."""
  return {a: None for a in atoms if not isinstance(a, jax_core.Literal)}
