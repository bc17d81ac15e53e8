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
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core as jax_core
import jax.numpy as jnp

from paxon.pipeline.schedules import model_functions, table

_Tree = model_functions.Tree


class Operands(NamedTuple):
  """What operations of one chunk have in common.

  Attributes:
    functions: The model.
    outer: Variables of `first` and `last`.
    context: The microbatch and the virtual stage.
    is_first: Whether the chunk is the model's first virtual stage, bool.
    residuals: What the forward operation saved.
  """

  functions: model_functions.ModelFunctions
  outer: _Tree
  context: model_functions.Context
  is_first: jax.Array
  residuals: Sequence[jax.Array] = ()


class Results(NamedTuple):
  """What an operation returns; zeros where it computes nothing.

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

  (_, auxiliary), pull = jax.vjp(run, chunk, _input(given, x))
  gradients, dx = pull((dy, jnp.ones_like(auxiliary)))
  return Results(dx, jnp.float32(0), _as_float32(gradients))


# Backward operations that run the forward pass again.
RECOMPUTING: Mapping[table.Kind, Run] = {
  table.Kind.FORWARD: _forward,
  table.Kind.BACKWARD: _backward,
}


def make_saving(split: "Split") -> Mapping[table.Kind, Run]:
  """Returns operations that save and read residuals.

  Args:
    split: The model's chunk; its `others` are a `Context`.
  """

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
  """Forward and backward pass as two functions; `free` are (variables, others).

  Attributes:
    forward: `(free, x) -> (y, auxiliary), residuals`.
    backward: `(free, residuals, dy) -> gradients of the variables, dx`.
    residuals: Shapes of what `forward` saves.
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
  program = _Program()
  arguments: list[list[int]] = []
  numbers: list[int] = []
  for tree, is_free in zip(given, (True, False, False), strict=True):
    count = len(jax.tree.leaves(tree))
    avals = closed.in_avals[len(numbers) : len(numbers) + count]
    arguments.append([program.make_value(aval, is_free) for aval in avals])
    numbers += arguments[-1]
  outputs = program.add(closed, numbers)
  treedefs = [jax.tree.structure(tree) for tree in shapes]
  count = treedefs[0].num_leaves
  return _split(
    program, arguments, (outputs[:count], outputs[count:]), treedefs
  )


# Equations that only call others, by their names in two versions of JAX.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})


class _Constant(NamedTuple):
  value: Any


# A value of the program: its number, or a constant.
_Value = int | _Constant


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Equation:
  """One equation of a program.

  Attributes:
    eqn: JAX's equation.
    scope: Names around it, of modules and transformations.
    inputs: Values.
    outputs: Values.
    is_free: Whether it depends on variables and other arguments only.
  """

  eqn: Any
  scope: str
  inputs: tuple[_Value, ...]
  outputs: tuple[int, ...]
  is_free: bool


class _Program:
  """Equations with all calls inlined."""

  def __init__(self) -> None:
    self.avals: dict[int, Any] = {}
    self._is_free: dict[int, bool] = {}
    self._equations: list[_Equation] = []
    self._by_output: dict[int, _Equation] = {}
    self._numbers = itertools.count()

  def make_value(self, aval: Any, is_free: bool) -> int:
    number = next(self._numbers)
    self.avals[number], self._is_free[number] = aval, is_free
    return number

  def add(
    self, closed: Any, inputs: Sequence[_Value], around: str = ""
  ) -> list[_Value]:
    """Adds the equations of a jaxpr; returns its outputs.

    Args:
      closed: The jaxpr.
      inputs: Its inputs.
      around: Names around it.
    """
    jaxpr = closed.jaxpr
    env: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
      env[var] = _Constant(const)

    def read(atom: Any) -> _Value:
      if isinstance(atom, jax_core.Literal):
        return _Constant(atom.val)
      return env[atom]

    for eqn in jaxpr.eqns:
      given = tuple(read(atom) for atom in eqn.invars)
      own = str(eqn.source_info.name_stack)
      scope = "/".join(filter(None, (around, own)))
      if eqn.primitive.name in _CALLS:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        outputs = self.add(inner, given, scope)
      else:
        is_free = all(
          isinstance(v, _Constant) or self._is_free[v] for v in given
        )
        numbers = tuple(
          self.make_value(var.aval, is_free) for var in eqn.outvars
        )
        equation = _Equation(
          eqn=eqn, scope=scope, inputs=given, outputs=numbers, is_free=is_free
        )
        self._equations.append(equation)
        self._by_output |= dict.fromkeys(numbers, equation)
        outputs = list(numbers)
      env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def find_needed(
    self, outputs: Sequence[_Value], have: set[int]
  ) -> tuple[list[_Equation], list[int]]:
    """Returns the equations that outputs depend on, and the inputs they use.

    Args:
      outputs: Values.
      have: Values that are computed elsewhere.

    Returns:
      Equations in order, and the values of `have` that they or the outputs use.
    """
    used: set[int] = set()
    chosen: set[int] = set()
    todo = [v for v in outputs if not isinstance(v, _Constant)]
    while todo:
      number = todo.pop()
      if number in have:
        used.add(number)
        continue
      equation = self._by_output.get(number)
      if equation is None or id(equation) in chosen:
        continue
      chosen.add(id(equation))
      todo += [v for v in equation.inputs if not isinstance(v, _Constant)]
    return [e for e in self._equations if id(e) in chosen], sorted(used)


def _split(
  program: _Program,
  arguments: Sequence[Sequence[int]],
  outputs: Sequence[Sequence[_Value]],
  treedefs: Sequence[Any],
) -> Split:
  free, x, dy = arguments
  forward, _ = program.find_needed(outputs[0], set())
  computed = {n for e in forward if not e.is_free for n in e.outputs}
  backward, residuals = program.find_needed(outputs[1], {*x, *computed})

  def run_forward(given: _Tree, x_values: _Tree) -> Any:
    env = _env((free, given), (x, x_values))
    _run(forward, env)
    return _read(env, outputs[0], treedefs[0]), [env[n] for n in residuals]

  def run_backward(
    given: _Tree, saved: Sequence[jax.Array], gradient: _Tree
  ) -> Any:
    env = _env((free, given), (residuals, list(saved)), (dy, gradient))
    _run(backward, env)
    return _read(env, outputs[1], treedefs[1])

  avals = (program.avals[n] for n in residuals)
  return Split(
    forward=run_forward,
    backward=run_backward,
    residuals=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals],
  )


def _env(*pairs: tuple[Sequence[int], _Tree]) -> dict[int, jax.Array]:
  env: dict[int, jax.Array] = {}
  for numbers, tree in pairs:
    env |= zip(numbers, jax.tree.leaves(tree), strict=True)
  return env


def _run(equations: Sequence[_Equation], env: dict[int, jax.Array]) -> None:
  """Computes the outputs of equations, under the names they were traced with.

  Programs and profiles then show the modules of the model. A context of the
  trace, such as host compute, is entered again.
  """
  for e in equations:
    given = [v.value if isinstance(v, _Constant) else env[v] for v in e.inputs]
    primitive = e.eqn.primitive
    with jax.named_scope(e.scope), e.eqn.ctx.manager:
      made = primitive.bind(*given, **primitive.get_bind_params(e.eqn.params))
    found = made if primitive.multiple_results else [made]
    env.update(zip(e.outputs, found, strict=True))


def _read(
  env: Mapping[int, Any], values: Sequence[_Value], treedef: Any
) -> _Tree:
  leaves = [v.value if isinstance(v, _Constant) else env[v] for v in values]
  return jax.tree.unflatten(treedef, leaves)
