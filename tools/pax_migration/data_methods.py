"""Interpreter of the method `datasets()` of a Pax experiment.

Each input that the method returns becomes a base class of ours with its data,
and the values of its knobs.
"""

import ast
from collections.abc import Mapping
import copy
from typing import Any

from paxon.tools.pax_migration import (
  class_tables,
  task_methods,
  task_tables,
  values,
)


def interpret(
  method: ast.FunctionDef,
  *,
  constants: Mapping[str, class_tables.Constant],
  decided: Mapping[str, Any],
  find_function: task_methods.Find,
  find_method: task_methods.Find,
) -> tuple[task_methods.Effects, list[str]]:
  """Returns the effects of a method `datasets()`, and base classes of ours.

  Raises:
    values.UntranslatableError: An input has no counterpart.
  """
  effects = task_methods.Effects()
  run = task_methods.Run(
    constants, decided, find_function, find_method, effects
  )
  env: dict[str, Any] = {method.args.args[0].arg: task_methods.Owner()}
  inputs = []
  for statement in method.body:
    if isinstance(statement, ast.Return):
      returned = statement.value
      if not isinstance(returned, ast.List | ast.Tuple):
        raise values.UntranslatableError("datasets() returns no plain list")
      inputs = [run.resolve(each, env) for each in returned.elts]
    else:
      run.block([statement], env)
  if effects.problems:
    raise values.UntranslatableError(effects.problems[0].reason)
  bases: list[str] = []
  run.effects = effects = task_methods.Effects()
  for i, each in enumerate(inputs):
    if isinstance(each, task_methods.Node) and isinstance(
      each.fields.get("input"), task_methods.Node
    ):
      inner = each.fields.pop("input")
      each = task_methods.Node(inner.cls, {**each.fields, **inner.fields})
    name = (
      each.cls.rpartition(".")[2] if isinstance(each, task_methods.Node) else ""
    )
    known = task_tables.INPUTS.get(name)
    if known is None:
      raise values.UntranslatableError(f"the input {name or i} is not known")
    is_training = each.fields.get("is_training")
    trains = i == 0 if is_training is None else is_training.text == "True"
    if known.note:
      effects.notes.append((method.lineno, f"{name}: {known.note}"))
    fields = known.train if trains or len(inputs) == 1 else known.evaluation
    if not trains and len(inputs) == 1:
      reason = "there is no training input; this one is in its position"
      effects.problems.append(task_methods.Problem(method.lineno, name, reason))
    _set_input(run, each, fields, method.lineno)
    if known.ours not in bases:
      bases.append(known.ours)
  return effects, bases


def _set_input(
  run: task_methods.Run,
  made: task_methods.Node,
  fields: Mapping[str, task_tables.Field],
  line: int,
) -> None:
  """Sets the knobs of an input."""
  for name, value in made.fields.items():
    code = value.text if isinstance(value, task_methods.Code) else ""
    try:
      if name in fields and code:
        run.set_field(
          fields[name], task_methods.Code(_fold(value.tree)), line, name
        )
    except values.UntranslatableError as error:
      problem = task_methods.Problem(line, f"{name} = {code}", str(error))
      run.effects.problems.append(problem)
    if name in fields:
      continue
    if name not in task_tables.INPUT_FIELDS:
      reason = f"no counterpart of {name} of {made.cls}"
      run.effects.problems.append(
        task_methods.Problem(line, f"{name} = {code}", reason)
      )


def _fold(tree: ast.expr) -> ast.expr:
  """Returns an expression with its decided conditions left out."""

  class Fold(ast.NodeTransformer):
    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
      test = values.evaluate(ast.unparse(node.test), {})
      if test is values.UNKNOWN:
        return self.generic_visit(node)
      return self.visit(node.body if test else node.orelse)

  return Fold().visit(copy.deepcopy(tree))
