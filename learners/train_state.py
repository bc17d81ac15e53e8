"""The train state: step, variables, optimizer state, and counters.

All leaves are plain arrays, which makes the state a pytree to compile against
and to checkpoint.
"""

import dataclasses
from typing import Any, Final, TypeAlias
import zlib

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int
import optax

from paxon.learners import learner as learner_lib
from paxon.learners import optimizer_state, parameter_average, variable_groups
from paxon.sharding import variables as variables_lib

# An array; in trees derived from a state also a spec, a shape or a sharding.
Leaf: TypeAlias = Any

# Tokens are counted in two int32 digits [high, low] in base 2**30: float32 is
# exact only up to 2**24, and int64 is off by default.
_TOKEN_BITS: Final = 30


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
  learner: learner_lib.Learner,
  specs: variable_groups.Specs,
) -> TrainState:
  """Returns the state before the first step; `variables` are plain arrays."""
  optimized = variable_groups.select(
    variables, variable_groups.Group.OPTIMIZED, specs=specs
  )
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    variables=variables,
    opt_state=optimizer_state.initial(learner.transform(specs), optimized),
    skipped=None if learner.skip is None else jnp.zeros((), jnp.int32),
    average=(
      None if learner.average is None else learner.average.initial(optimized)
    ),
    tokens=zero_tokens() if learner.count_tokens else None,
  )


def state_specs(
  specs: variable_groups.Specs, *, learner: learner_lib.Learner
) -> TrainState:
  """Returns a state with a `VariableSpec` in place of each array.

  `specs` are those of the model.
  """
  optimized = variable_groups.select(
    specs, variable_groups.Group.OPTIMIZED, specs=specs
  )
  opt_state = optimizer_state.specs(learner.transform(specs), optimized)
  if learner.offload_state:
    # Not scalars, which cost more to copy than they take.
    opt_state = jax.tree.map(
      lambda spec: dataclasses.replace(spec, on_host=bool(spec.shape)),
      opt_state,
    )
  return TrainState(
    step=_counter("step"),
    variables=specs,
    opt_state=opt_state,
    skipped=None if learner.skip is None else _counter("skipped"),
    average=None
    if learner.average is None
    else _average_specs(optimized, learner.average),
    tokens=_counter("tokens", shape=(2,)) if learner.count_tokens else None,
  )


def evaluation_variables(
  state: TrainState,
  *,
  learner: learner_lib.Learner,
  specs: variable_groups.Specs,
) -> variable_groups.Tree:
  """Returns the variables for evaluation and decoding.

  With an average, call this inside the compiled function that uses the result,
  so that no second copy of the parameters stays in memory. Without an average
  the variables of the state are returned.
  """
  if learner.average is None or state.average is None:
    return state.variables
  optimized, others = (
    variable_groups.select(state.variables, *groups, specs=specs)
    for groups in (
      (variable_groups.Group.OPTIMIZED,),
      tuple(set(variable_groups.Group) - {variable_groups.Group.OPTIMIZED}),
    )
  )
  return variable_groups.merge(
    learner.average.values(state.average, optimized), others
  )


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
    count=_counter("average/count"),
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
) -> jax.Array:
  """Returns the random key, a typed scalar, of one stream at one step.

  `step` may be traced; `stream` is a name such as "dropout"; `generator` is one
  of `learner.GENERATORS`.
  """
  # An explicit implementation: the user's default must not change a run.
  key = jax.random.key(seed, impl=generator)
  # crc32, because Python's hash() differs between processes.
  return jax.random.fold_in(
    jax.random.fold_in(key, step), zlib.crc32(stream.encode())
  )


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
