"""The train state: step, variables, optimizer state, and counters.

All leaves are plain arrays, which makes the state a pytree to compile against
and to checkpoint.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, Final, TypeAlias
import zlib

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int
import optax

from paxon.learners import learner as learner_lib
from paxon.learners import (
  learner_groups,
  optimizer_state,
  parameter_average,
  variable_groups,
)
from paxon.sharding import variables as variables_lib

# An array; in trees derived from a state also a spec, a shape or a sharding.
Leaf: TypeAlias = Any

# Tokens are counted in two int32 digits [high, low] in base 2**30: float32 is
# exact only up to 2**24, and int64 is off by default.
_TOKEN_BITS: Final = 30
_COUNT: Final = "count"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """Step, variables, optimizer state, and optional counters.

  Attributes:
    step: int32 scalar, the number of completed steps.
    variables: Nested dicts {collection: {module: ... {variable: array}}}.
    opt_state: The state of `Learner.transform`, for the optimized variables.
    skipped: int32 scalar, the number of steps without an update; `None` unless
      `Learner.skip` is set.
    average: `parameter_average.AverageState` of the optimized variables; `None`
      unless `Learner.average` is set.
    tokens: int32 [2], the total loss weight of all updates as two digits (see
      `add_tokens`); `None` unless `Learner.count_tokens` is set.

  With `LearnerGroups` each field of a learner is a dict by the learners' names.
  """

  step: Leaf
  variables: variable_groups.Tree
  opt_state: optax.OptState
  skipped: Leaf = None
  average: Leaf = None
  tokens: Leaf = None


def make_initial(
  variables: variable_groups.Tree,
  *,
  learner: learner_groups.AnyLearner,
  specs: variable_groups.Specs,
) -> TrainState:
  """Returns the state before the first step; `variables` are plain arrays."""

  def make(part: learner_groups.Part) -> dict[str, Any]:
    learner = part.learner
    optimized = variable_groups.select(
      variables, variable_groups.Group.OPTIMIZED, specs=part.specs
    )
    return {
      "opt_state": optimizer_state.initial(
        learner.transform(part.specs), optimized
      ),
      "skipped": None if learner.skip is None else jnp.zeros((), jnp.int32),
      "average": (
        None if learner.average is None else learner.average.initial(optimized)
      ),
      "tokens": zero_tokens() if learner.count_tokens else None,
    }

  return TrainState(
    step=jnp.zeros((), jnp.int32),
    variables=variables,
    **learner_groups.collect(learner_groups.split(learner, specs), make),
  )


def state_specs(
  specs: variable_groups.Specs, *, learner: learner_groups.AnyLearner
) -> TrainState:
  """Returns a state with a `VariableSpec` in place of each array.

  `specs` are those of the model.
  """
  return TrainState(
    step=_counter("step"),
    variables=specs,
    **learner_groups.collect(
      learner_groups.split(learner, specs), _make_field_specs
    ),
  )


def _make_field_specs(part: learner_groups.Part) -> dict[str, Any]:
  """Returns the specs of the fields that belong to a learner."""
  learner = part.learner
  optimized = variable_groups.select(
    part.specs, variable_groups.Group.OPTIMIZED, specs=part.specs
  )
  opt_state = optimizer_state.specs(learner.transform(part.specs), optimized)
  if learner.offload_state:
    # Not scalars, which cost more to copy than they take.
    opt_state = jax.tree.map(
      lambda spec: dataclasses.replace(spec, on_host=bool(spec.shape)),
      opt_state,
    )
  fields = {
    "opt_state": opt_state,
    "skipped": None if learner.skip is None else _counter("skipped"),
    "average": None
    if learner.average is None
    else _average_specs(optimized, learner.average),
    "tokens": _counter("tokens", shape=(2,)) if learner.count_tokens else None,
  }
  return fields if part.name is None else _rename(fields, part.name)


def _rename(fields: dict[str, Any], learner: str) -> dict[str, Any]:
  """Returns specs whose names differ from those of other learners."""

  def rename(spec: variables_lib.VariableSpec) -> variables_lib.VariableSpec:
    field, slash, rest = spec.name.partition("/")
    if field == "average" and rest != _COUNT:
      return spec  # Its variable belongs to one learner.
    return dataclasses.replace(spec, name=f"{field}/{learner}{slash}{rest}")

  return jax.tree.map(rename, fields)


def evaluation_variables(
  state: TrainState,
  *,
  learner: learner_groups.AnyLearner,
  specs: variable_groups.Specs,
) -> variable_groups.Tree:
  """Returns the variables for evaluation and decoding.

  With an average, call this inside the compiled function that uses the result,
  so that no second copy of the parameters stays in memory. Without an average
  the variables of the state are returned.
  """
  values = state.variables
  for part in learner_groups.split(learner, specs):
    average = learner_groups.pick(state.average, part)
    if part.learner.average is None or average is None:
      continue
    optimized, others = (
      variable_groups.select(values, *groups, specs=part.specs)
      for groups in (
        (variable_groups.Group.OPTIMIZED,),
        tuple(set(variable_groups.Group) - {variable_groups.Group.OPTIMIZED}),
      )
    )
    values = variable_groups.merge(
      part.learner.average.values(average, optimized), others
    )
  return values


def _counter(
  name: str, *, shape: tuple[int, ...] = ()
) -> variables_lib.VariableSpec:
  return variables_lib.VariableSpec(
    name=name,
    shape=shape,
    dtype=jnp.dtype(jnp.int32),
    axes=(None,) * len(shape),
    trainable=False,
  )


def _average_specs(
  optimized: variable_groups.Specs,
  average: parameter_average.ParameterAverage,
) -> parameter_average.AverageState:
  return parameter_average.AverageState(
    count=_counter(f"average/{_COUNT}"),
    average=jax.tree.map(
      lambda spec: dataclasses.replace(
        spec,
        name=f"average/{spec.name}",
        dtype=jnp.dtype(jnp.float32),
        initializer=None,
        regularized=False,
        trainable=False,
        # Debiasing divides the average before layers read it.
        read_dtype=None if average.debias else spec.read_dtype,
      ),
      optimized,
    ),
  )


def make_key(
  seed: int,
  *,
  step: ArrayLike,
  stream: str,
  generator: str = learner_lib.THREEFRY,
  folds: Sequence[ArrayLike] = (),
) -> jax.Array:
  """Returns the random key, a typed scalar, of one stream at one step.

  `step` may be traced; `stream` is a name such as "dropout"; `generator` is one
  of `learner.GENERATORS`. `folds` are further numbers, which may be traced, on
  which the key depends: of one of several updates of a step.
  """
  # An explicit implementation: the user's default must not change a run.
  key = jax.random.key(seed, impl=generator)
  # crc32, because Python's hash() differs between processes.
  key = jax.random.fold_in(
    jax.random.fold_in(key, step), zlib.crc32(stream.encode())
  )
  return functools.reduce(jax.random.fold_in, folds, key)


def zero_tokens() -> Int[Array, "2"]:
  """Returns the token count before the first step."""
  return jnp.zeros((2,), jnp.int32)


def add_tokens(
  count: Int[Array, "2"], tokens: Float[Array, ""]
) -> Int[Array, "2"]:
  """Returns the token count after a step.

  Args:
    count: Digits [high, low] in base 2**30 before the step.
    tokens: Loss weight of the step, less than 2**30; rounded to an integer.
  """
  low = count[1] + jnp.round(tokens).astype(jnp.int32)
  carry = low >> _TOKEN_BITS
  return jnp.stack([count[0] + carry, low - (carry << _TOKEN_BITS)])


def tokens_as_float(count: Int[Array, "2"]) -> Float[Array, ""]:
  """Returns the token count as float32, exact to 7 decimal digits."""
  high, low = count[0].astype(jnp.float32), count[1].astype(jnp.float32)
  return high * jnp.float32(2**_TOKEN_BITS) + low
