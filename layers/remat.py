"""Rematerialization policies: values that a stack saves for the backward pass.

A policy selects intermediate values of a block to save; others are recomputed.
Without a policy a stack saves everything, except that a loop on one CPU follows
`recompute_elementwise`; with any policy it saves the input of each block.
Layers name their large intermediate values as below. `save_only` saves named
values on the device, `offload` moves them to host memory and back, and `|`
joins policies:

  remat.save_only(remat.ATTENTION_OUTPUT) | remat.offload(remat.ATTENTION_QUERY)
  remat.save_projections | remat.save_only(remat.ATTENTION_CONTEXT)

The first policy that saves a value decides where. On CPU, offloaded values are
saved like any other. Knobs and flags also take a policy as text, and JAX's
policies, as functions or as text:

  --fdl.remat_policy=save_projections
  --fdl.remat_policy='save_projections | save_only("attention_context")'
  --fdl.remat_policy=dots_saveable

  Pax's AutodiffCheckpointType      here
  SAVE_EVERYTHING                   None
  SAVE_NOTHING, ITERATION_INPUT,
  TRANSFORMER_LAYER_OUTPUT          save_nothing
  DOT_ONLY                          save_matmuls
  DOT_WITH_NO_BATCH_DIM             save_projections
  OUT_PROJ, CONTEXT                 save_only(ATTENTION_OUTPUT), ..._CONTEXT
  QKV_OUT_PROJ(_SEPARATE)           save_only(*ATTENTION_INPUTS,
                                      ATTENTION_OUTPUT)
  DOT_FOR_MLPERF_200B               save_only(*ATTENTION)
  DOT_EXCEPT_LOGITS_FFN1            save_only(*ATTENTION, FEED_FORWARD_OUTPUT)
  DOT_EXCEPT_LOGITS                 save_only(*ATTENTION, *FEED_FORWARD)
  QUANTIZED, UNET_CONV(_ALL)        save_only of the names that layers `tag`
"""

import ast
from collections.abc import Callable
import dataclasses
from typing import Any, Final

import jax
from jax import ad_checkpoint

from paxon.layers.cpu import forms

Policy = Callable[..., Any]

# Inputs of the attention kernel (queries and keys after rotary positions).
ATTENTION_QUERY: Final = "attention_query"
ATTENTION_KEY: Final = "attention_key"
ATTENTION_VALUE: Final = "attention_value"
# Output of the kernel, and of the output projection.
ATTENTION_CONTEXT: Final = "attention_context"
ATTENTION_OUTPUT: Final = "attention_output"
# Output and softmax statistics of a fused kernel (splash or cuDNN), in its own
# layout: with them its forward kernel is not run again.
ATTENTION_RESIDUALS: Final = "attention_residuals"
# Input of a block, if a policy applies.
BLOCK_INPUT: Final = "block_input"
# The widest tensor of a feed-forward layer, and its output.
FEED_FORWARD_HIDDEN: Final = "feed_forward_hidden"
FEED_FORWARD_OUTPUT: Final = "feed_forward_output"
# Mean and factor of a norm, one number each for a token. Without them a GPU
# writes the gradient of the scale for each token before it sums them.
NORM_STATISTICS: Final = "norm_statistics"

ATTENTION_INPUTS: Final = (ATTENTION_QUERY, ATTENTION_KEY, ATTENTION_VALUE)
ATTENTION: Final = (*ATTENTION_INPUTS, ATTENTION_CONTEXT, ATTENTION_OUTPUT)
FEED_FORWARD: Final = (FEED_FORWARD_HIDDEN, FEED_FORWARD_OUTPUT)

# The names that layers give.
NAMES: Final = (
  *ATTENTION,
  ATTENTION_RESIDUALS,
  BLOCK_INPUT,
  *FEED_FORWARD,
  NORM_STATISTICS,
)

# The primitives that `recompute_elementwise` does not save: of arithmetic, of
# comparisons, of layout, of random bits.
_ELEMENTWISE: Final = frozenset(
  [
    "abs",
    "add",
    "add_any",
    "cbrt",
    "ceil",
    "clamp",
    "convert_element_type",
    "cos",
    "cosh",
    "div",
    "erf",
    "erf_inv",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "integer_pow",
    "is_finite",
    "log",
    "log1p",
    "logistic",
    "max",
    "min",
    "mul",
    "neg",
    "nextafter",
    "pow",
    "reduce_precision",
    "rem",
    "round",
    "rsqrt",
    "select_n",
    "sharding_constraint",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
    "tan",
    "tanh",
    "and",
    "eq",
    "ge",
    "gt",
    "le",
    "lt",
    "ne",
    "not",
    "or",
    "xor",
    "broadcast_in_dim",
    "concatenate",
    "copy",
    "expand_dims",
    "iota",
    "pad",
    "reshape",
    "rev",
    "slice",
    "split",
    "squeeze",
    "transpose",
    "random_bits",
    "random_fold_in",
    "random_split",
    "random_unwrap",
    "random_wrap",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "threefry2x32",
  ]
)
# Kinds of memory, as JAX calls them.
_DEVICE: Final = "device"
_HOST: Final = "pinned_host"


def save_everything(*args: Any, **params: Any) -> Any:
  """Policy: save all values, so that nothing is recomputed."""
  return jax.checkpoint_policies.everything_saveable(*args, **params)


def save_nothing(*args: Any, **params: Any) -> Any:
  """Policy: save only the input of each block (full rematerialization)."""
  return jax.checkpoint_policies.nothing_saveable(*args, **params)


def save_projections(*args: Any, **params: Any) -> Any:
  """Policy: save matmuls with weights, not those of attention."""
  policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  return policy(*args, **params)


def save_projections_and_attention(*args: Any, **params: Any) -> Any:
  """Policy: save what `save_projections` saves, and results of fused attention.

  Norms, rotations and activations are recomputed, which needs no matmul.
  """
  policy = save_only(ATTENTION_RESIDUALS)
  return Either((save_projections, policy))(*args, **params)


def save_matmuls(*args: Any, **params: Any) -> Any:
  """Policy: save all matmuls and convolutions, including attention."""
  return jax.checkpoint_policies.dots_saveable(*args, **params)


def recompute_elementwise(primitive: Any, *_: Any, **params: Any) -> bool:
  """Policy: save what is not elementwise, and named values.

  The recomputation has no matmul, convolution, reduction or sort, and of loops
  only those with elementwise results. The named value that is not saved is
  `FEED_FORWARD_HIDDEN`, the widest.
  """
  if primitive.name == "name":
    return params["name"] != FEED_FORWARD_HIDDEN
  return primitive.name not in _ELEMENTWISE


def offload_projections(*args: Any, **params: Any) -> Any:
  """Policy: offload to the host what `save_projections` saves."""
  policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
    _DEVICE, _HOST
  )
  return policy(*args, **params)


class _Joinable:
  """A policy that `|` joins with other policies or functions."""

  def __or__(self, other: Policy) -> "Either":
    return Either((*_policies(self), *_policies(other)))

  def __ror__(self, other: Policy) -> "Either":
    return Either((*_policies(other), *_policies(self)))


@dataclasses.dataclass(frozen=True)
class SaveOnly(_Joinable):
  """Policy: save the values with these names; compares by value.

  Attributes:
    names: Names given by `tag`, usually constants of this module.
  """

  names: tuple[str, ...]

  def __post_init__(self) -> None:
    if not self.names:
      raise ValueError(
        "SaveOnly.names must not be empty; use `save_nothing` to keep only "
        "the input of each block."
      )

  def __call__(self, *args: Any, **params: Any) -> Any:
    """Returns whether a value is saved."""
    if ATTENTION_RESIDUALS in self.names and _is_cudnn(*args):
      return True
    policy = jax.checkpoint_policies.save_only_these_names(*self.names)
    return policy(*args, **params)


@dataclasses.dataclass(frozen=True)
class Offload(_Joinable):
  """Policy: offload the values with these names to the host.

  Attributes:
    names: Names given by `tag`, usually constants of this module.
  """

  names: tuple[str, ...]

  def __post_init__(self) -> None:
    if not self.names:
      raise ValueError("Offload.names must not be empty.")

  def __call__(self, *args: Any, **params: Any) -> Any:
    """Returns whether to save, offload or recompute a value."""
    return _make_named(offloaded=self.names)(*args, **params)


@dataclasses.dataclass(frozen=True)
class Either(_Joinable):
  """Policy: the first of several policies that saves a value.

  Attributes:
    policies: In order of precedence.
  """

  policies: tuple[Policy, ...]

  def __call__(self, *args: Any, **params: Any) -> Any:
    """Returns whether to save, offload or recompute a value."""
    # JAX's value for recomputation, which has no public name.
    again = _make_named()(*args, **params)
    for policy in self.policies:
      answer = policy(*args, **params)
      if answer is not False and not isinstance(answer, type(again)):
        return answer
    return again


def _is_cudnn(primitive: Any, *_: Any) -> bool:
  """Whether a primitive is JAX's forward pass of cuDNN attention.

  Its residuals are made inside JAX, where they cannot be tagged.
  """
  return primitive.name.startswith("dot_product_attention_fwd")


def _policies(policy: Any) -> tuple[Policy, ...]:
  return policy.policies if isinstance(policy, Either) else (policy,)


def _make_named(*, offloaded: tuple[str, ...] = ()) -> Policy:
  return jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=list(offloaded),
    offload_src=_DEVICE,
    offload_dst=_HOST,
  )


def save_only(*names: str) -> SaveOnly:
  """Returns the policy that saves only the values with these names."""
  return SaveOnly(names)


def offload(*names: str) -> Offload:
  """Returns the policy that offloads the values with these names."""
  return Offload(names)


def find_names(policy: Policy | str | None) -> tuple[str, ...]:
  """Returns the names of values that a policy saves or offloads."""
  found = to_policy(policy)
  parts = () if found is None else _policies(found)
  named = [each for each in parts if isinstance(each, SaveOnly | Offload)]
  return tuple(dict.fromkeys(name for each in named for name in each.names))


# Policies that text may name: ours, and JAX's names of them.
_POLICIES: Final = {
  **{
    policy.__name__: policy
    for policy in (
      save_everything,
      save_nothing,
      save_projections,
      save_projections_and_attention,
      save_matmuls,
      recompute_elementwise,
      offload_projections,
    )
  },
  "everything_saveable": save_everything,
  "nothing_saveable": save_nothing,
  "dots_saveable": save_matmuls,
  "checkpoint_dots": save_matmuls,
  "dots_with_no_batch_dims_saveable": save_projections,
  "checkpoint_dots_with_no_batch_dims": save_projections,
}
# Functions of names that make a policy.
_MAKERS: Final = {
  "save_only": save_only,
  "offload": offload,
  "save_only_these_names": save_only,
  "SaveOnly": SaveOnly,
  "Offload": Offload,
}
_PREFIXES: Final = (
  *("paxon.layers.remat.", "layers.remat.", "remat."),
  "jax.checkpoint_policies.",
)


def to_policy(policy: Policy | str | None) -> Policy | None:
  """Returns the policy that a text names, and JAX's policies as ours.

  Args:
    policy: A policy, or its text: names of this module and of
      `jax.checkpoint_policies`, with or without the module, joined by `|`. None
      and other functions are returned as they are.

  Raises:
    ValueError: The text names no policy.
  """
  if not isinstance(policy, str):
    by_jax = {
      getattr(jax.checkpoint_policies, name): ours
      for name, ours in _POLICIES.items()
      if hasattr(jax.checkpoint_policies, name)
    }
    return by_jax.get(policy, policy)
  try:
    return _evaluate(ast.parse(policy.strip(), mode="eval").body)
  except (ValueError, TypeError, SyntaxError, RecursionError) as error:
    reason = "" if isinstance(error, SyntaxError) else f": {error}"
    raise ValueError(
      f"remat_policy={policy!r} names no policy{reason}; write names of"
      " layers.remat or jax.checkpoint_policies, such as save_projections |"
      ' save_only("attention_context").'
    ) from error


def _evaluate(tree: ast.expr) -> Policy:
  """Returns the policy of an expression."""
  if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
    left, right = _evaluate(tree.left), _evaluate(tree.right)
    return Either((*_policies(left), *_policies(right)))
  if isinstance(tree, ast.Call):
    make = _find(ast.unparse(tree.func), _MAKERS)
    return make(
      *map(ast.literal_eval, tree.args),
      **{each.arg: ast.literal_eval(each.value) for each in tree.keywords},
    )
  return _find(ast.unparse(tree), _POLICIES)


def _find(name: str, known: dict[str, Any]) -> Any:
  for prefix in _PREFIXES:
    name = name.removeprefix(prefix)
  if name not in known:
    from paxon.sharding import suggestions  # Attention needs no more modules.

    hint = suggestions.suggest(name, known).rstrip(".")
    raise ValueError(f"there is no {name!r}{hint}")
  return known[name]


def tag(x: jax.Array, name: str) -> jax.Array:
  """Returns `x`, named for policies.

  It is saved in the dtype that `forms.saved_dtype` chooses.
  """
  saved = ad_checkpoint.checkpoint_name(
    x.astype(forms.saved_dtype(x.dtype)), name
  )
  return saved.astype(x.dtype)
