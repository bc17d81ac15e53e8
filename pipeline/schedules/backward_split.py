"""One piece's forward pass and its two gradients as three functions.

The piece with its backward pass is written down as equations (a jaxpr), and
each equation runs in the first part that needs it:

  forward       what the output follows from
  of_input      what the gradient of the input follows from, besides
  of_weights    what the gradients of the variables follow from, besides

So no part runs the forward pass again, and `of_weights` does not repeat the way
back through the layers. What one part leaves for a later one is kept: residuals
by `forward`, pairs (inputs of products and gradients of their outputs, mostly)
by `of_input`. What follows from variables and the microbatch alone, such as a
transposed kernel, a mask or dropout's bits, is never kept; each part makes it.

An equation is never cut. A loop over layers is one equation, which has both
gradients; so layers that are to be split are written one after the other.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
from jax.extend import core as jax_core

# Nested containers of arrays.
Tree = Any
# A piece: `(free, x) -> (y, auxiliary)`, where free are (variables, others).
Piece = Callable[[Tree, Tree, Tree], tuple[Tree, jax.Array]]

# Equations that only call others, by the names of two versions of JAX.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
# What values follow from: variables and microbatch; x too; dy too.
_FREE, _X, _DY = range(3)


class _Constant(NamedTuple):
  """A value that is known."""

  value: Any


# A value of the equations: its number, or a constant.
_Value = int | _Constant


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Equation:
  """One equation; its inputs and outputs are values.

  Attributes:
    eqn: What JAX wrote down.
    scope: Names around it, of the parts of the model and of transformations.
    inputs: Values.
    outputs: Values.
    level: The highest of its inputs.
  """

  eqn: Any
  scope: str
  inputs: tuple[_Value, ...]
  outputs: tuple[int, ...]
  level: int


class _Program:
  """Equations without calls, and shapes and levels of values."""

  def __init__(self) -> None:
    self.equations: list[_Equation] = []
    self.avals: dict[int, Any] = {}
    self.levels: dict[int, int] = {}
    self.by_output: dict[int, _Equation] = {}
    self._numbers = itertools.count()

  def value(self, aval: Any, level: int) -> int:
    number = next(self._numbers)
    self.avals[number], self.levels[number] = aval, level
    return number

  def level(self, value: _Value) -> int:
    return _FREE if isinstance(value, _Constant) else self.levels[value]

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
        level = max((self.level(value) for value in given), default=_FREE)
        numbers = tuple(self.value(var.aval, level) for var in eqn.outvars)
        equation = _Equation(
          eqn=eqn,
          scope=scope,
          inputs=given,
          outputs=numbers,
          level=level,
        )
        self.equations.append(equation)
        self.by_output |= dict.fromkeys(numbers, equation)
        outputs = list(numbers)
      env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def needed(
    self, outputs: Sequence[_Value], have: set[int]
  ) -> tuple[list[_Equation], list[int]]:
    """Returns what must run for outputs, and which values it is given.

    Args:
      outputs: What is wanted.
      have: Values that another part has made.

    Returns:
      Equations in order, and the values of `have` that they, or the outputs,
      use, in order of their numbers.
    """
    used: set[int] = set()
    chosen: set[int] = set()
    todo = [v for v in outputs if not isinstance(v, _Constant)]
    while todo:
      number = todo.pop()
      if number in have:
        used.add(number)
        continue
      equation = self.by_output.get(number)
      if equation is None or id(equation) in chosen:
        continue
      chosen.add(id(equation))
      todo += [v for v in equation.inputs if not isinstance(v, _Constant)]
    equations = [e for e in self.equations if id(e) in chosen]
    return equations, sorted(used)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
  """The three functions; `free` are (variables, others).

  Attributes:
    forward: `(free, x) -> (y, auxiliary), residuals`.
    of_input: `(free, residuals, dy) -> dx, pairs`.
    of_weights: `(free, pairs) -> gradients of the variables`.
    residuals: Shapes of what `forward` keeps.
    pairs: Shapes of what `of_input` keeps.
    splits: Whether anything is left for `of_weights` to do.
  """

  forward: Callable[[Tree, Tree], tuple[Tree, list[jax.Array]]]
  of_input: Callable[
    [Tree, Sequence[jax.Array], Tree], tuple[Tree, list[jax.Array]]
  ]
  of_weights: Callable[[Tree, Sequence[jax.Array]], Tree]
  residuals: list[jax.ShapeDtypeStruct]
  pairs: list[jax.ShapeDtypeStruct]
  splits: bool


def split(piece: Piece, *, variables: Tree, others: Tree, x: Tree) -> Split:
  """Returns a piece as three functions.

  Args:
    piece: `(variables, others, x) -> (y, auxiliary)`; `y` is like `x`, and the
      gradient of `auxiliary` is one.
    variables: Whose gradients are wanted, or their shapes.
    others: What else it is given, without gradients.
    x: Its input.
  """

  def whole(free: Tree, x: Tree, dy: Tree) -> Any:
    variables, others = free
    (y, auxiliary), pull = jax.vjp(
      lambda variables, x: piece(variables, others, x), variables, x
    )
    dw, dx = pull((dy, jax.numpy.ones_like(auxiliary)))
    return (y, auxiliary), dx, dw

  given = ((variables, others), x, x)
  closed, shapes = jax.make_jaxpr(whole, return_shape=True)(*given)
  program = _Program()
  inputs: list[list[int]] = []
  numbers: list[int] = []
  for tree, level in zip(given, (_FREE, _X, _DY), strict=True):
    count = len(jax.tree.leaves(tree))
    avals = closed.in_avals[len(numbers) : len(numbers) + count]
    inputs.append([program.value(aval, level) for aval in avals])
    numbers += inputs[-1]
  outputs = program.add(closed, numbers)
  treedefs = [jax.tree.structure(tree) for tree in shapes]
  parts: list[list[_Value]] = []
  for treedef in treedefs:
    parts.append(outputs[: treedef.num_leaves])
    outputs = outputs[treedef.num_leaves :]
  return _split(program, inputs, parts, treedefs)


def _split(
  program: _Program,
  inputs: Sequence[Sequence[int]],
  outputs: Sequence[Sequence[_Value]],
  treedefs: Sequence[Any],
) -> Split:
  free, x, dy = inputs
  y_out, dx_out, dw_out = outputs

  def kept(equations: Sequence[_Equation]) -> set[int]:
    return {n for e in equations if e.level > _FREE for n in e.outputs}

  forward, _ = program.needed(y_out, set())
  by_forward = {*x, *kept(forward)}
  of_input, used = program.needed(dx_out, by_forward)
  by_input = {*by_forward, *dy, *kept(of_input)}
  of_weights, pairs = program.needed(dw_out, by_input)
  residuals = sorted({*used, *(n for n in pairs if n in by_forward)})

  def run_forward(given: Tree, x_values: Tree) -> tuple[Tree, list[jax.Array]]:
    env = _env((free, given), (x, x_values))
    _run(forward, env)
    return _read(env, y_out, treedefs[0]), [env[n] for n in residuals]

  def run_of_input(
    given: Tree, kept: Sequence[jax.Array], gradient: Tree
  ) -> tuple[Tree, list[jax.Array]]:
    env = _env((free, given), (residuals, list(kept)), (dy, gradient))
    _run(of_input, env)
    return _read(env, dx_out, treedefs[1]), [env[n] for n in pairs]

  def run_of_weights(given: Tree, kept: Sequence[jax.Array]) -> Tree:
    env = _env((free, given), (pairs, list(kept)))
    _run(of_weights, env)
    return _read(env, dw_out, treedefs[2])

  def shapes(numbers: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    found = (program.avals[n] for n in numbers)
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in found]

  return Split(
    forward=run_forward,
    of_input=run_of_input,
    of_weights=run_of_weights,
    residuals=shapes(residuals),
    pairs=shapes(pairs),
    splits=any(e.level == _DY for e in of_weights),
  )


def _env(*pairs: tuple[Sequence[int], Tree]) -> dict[int, jax.Array]:
  env: dict[int, jax.Array] = {}
  for numbers, tree in pairs:
    env |= zip(numbers, jax.tree.leaves(tree), strict=True)
  return env


def _run(equations: Sequence[_Equation], env: dict[int, jax.Array]) -> None:
  """Computes the outputs of equations.

  Programs and profiles have the names of the parts of the model, as they would
  where nothing was written down, and what was to be computed elsewhere is.
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
) -> Tree:
  leaves = [v.value if isinstance(v, _Constant) else env[v] for v in values]
  return jax.tree.unflatten(treedef, leaves)
