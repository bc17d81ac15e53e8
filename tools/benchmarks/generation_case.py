"""Greedy decoding compared with plain JAX, torch and quantized weights."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers.decoding import generate, model_steps, samplers
from paxon.quantization import recipes, served_einsum
from paxon.sharding import variables
from paxon.tools.benchmarks import (
  decoder_lm_workload,
  pure_jax_decoder_lm,
  pure_jax_generation,
  timing,
  torch_decoder_lm,
)

# The overhead over hand-written code that the design accepts.
LIMIT = 1.05
TORCH_LIMIT = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contenders:
  """Both programs and their arguments.

  Attributes:
    ours: `(our variables, prompts, lengths) -> ids`, compiled.
    theirs: `(their parameters, prompts, lengths) -> ids`, compiled.
    our_values: Variables of our model.
    their_values: The same values, in the layout of the plain JAX model.
    prompts: int32 [B, P].
    lengths: int32 [B], different.
  """

  ours: jax.stages.Compiled
  theirs: jax.stages.Compiled
  our_values: Any
  their_values: Any
  prompts: jax.Array
  lengths: jax.Array

  def run_ours(self) -> jax.Array:
    """Returns our ids [B, P]."""
    ids = self.ours(self.our_values, self.prompts, self.lengths)
    return jax.block_until_ready(ids)

  def run_theirs(self) -> jax.Array:
    """Returns the ids of the plain JAX program."""
    ids = self.theirs(self.their_values, self.prompts, self.lengths)
    return jax.block_until_ready(ids)


def compile_both(
  workload: decoder_lm_workload.Workload, *, is_stacked: bool = False
) -> Contenders:
  """Compiles both; they generate as many tokens as the longest prompt has.

  Args:
    workload: Sizes.
    is_stacked: Whether our layers stay stacked, which on one CPU they do not.
  """
  c, num_new = workload.config, workload.length
  model = decoder_lm_workload.make_model(c, scan=workload.scan)
  theirs = pure_jax_decoder_lm.initial_state(c, jax.random.key(0))["params"]
  ours: dict[str, Any] = {"params": decoder_lm_workload.from_pure_jax(theirs)}
  if not is_stacked:
    ours = decoder_lm_workload.decoding_variables(c, theirs)
  rng = np.random.default_rng(0)
  shape = (workload.global_batch_size, workload.length)
  prompts = jnp.asarray(rng.integers(0, c.vocab_size, shape), jnp.int32)
  # From half of the length to all of it.
  lengths = rng.integers(shape[1] // 2, shape[1] + 1, shape[0])
  arrays = prompts, jnp.asarray(lengths, jnp.int32)

  run = functools.partial(_generate, model, num_new)
  other = functools.partial(
    pure_jax_generation.generate, num_new=num_new, dtype=c.dtype
  )
  return Contenders(
    ours=jax.jit(run).lower(ours, *arrays).compile(),
    theirs=jax.jit(other).lower(theirs, *arrays).compile(),
    our_values=ours,
    their_values=theirs,
    prompts=arrays[0],
    lengths=arrays[1],
  )


def _generate(
  model: nn.Module,
  num_new: int,
  values: Any,
  prompts: jax.Array,
  lengths: jax.Array,
) -> jax.Array:
  return generate.generate(
    model_steps.make_prefill(model, values),
    model_steps.make_decode_step(model, values),
    prompts,
    lengths,
    sampler=samplers.Greedy(),
    key=jax.random.key(0),
    max_new_tokens=num_new,
  ).ids


def run(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int
) -> timing.Comparison:
  """Returns the time of our decoding over that of plain JAX, on one device."""
  both = compile_both(workload)
  return _compare(
    both.run_ours, both.run_theirs, "plain JAX", LIMIT, workload, name, rounds
  )


def run_torch(
  workload: decoder_lm_workload.Workload,
  *,
  name: str,
  rounds: int,
  use_transformers: bool = False,
) -> timing.Comparison:
  """Returns the time of our decoding over that of torch.

  Args:
    workload: Sizes.
    name: Name of the case.
    rounds: Number of rounds.
    use_transformers: Whether transformers decodes, instead of torch alone.

  Raises:
    ImportError: torch or transformers is not installed.
  """
  both = compile_both(workload)
  make = (
    torch_decoder_lm.make_generate
    if use_transformers
    else torch_decoder_lm.make_static_generate
  )
  theirs = make(
    workload.config,
    both.their_values,
    both.prompts,
    both.lengths,
    num_new=workload.length,
  )
  return _compare(
    both.run_ours,
    theirs,
    "transformers" if use_transformers else "torch.compile",
    TORCH_LIMIT,
    workload,
    name,
    rounds,
  )


def run_quantized(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int, recipe: str
) -> timing.Comparison:
  """Returns the time of decoding with quantized weights over that with float.

  Args:
    workload: Sizes.
    name: Name of the case.
    rounds: Number of rounds.
    recipe: Name of a recipe without calibration, whose weights are stored.
  """
  both = compile_both(workload)
  quantized, values = compile_quantized(both, workload, recipe)
  return _compare(
    lambda: jax.block_until_ready(
      quantized(values, both.prompts, both.lengths)
    ),
    both.run_ours,
    "float weights",
    None,
    workload,
    name,
    rounds,
  )


def compile_quantized(
  both: Contenders, workload: decoder_lm_workload.Workload, recipe: str
) -> tuple[jax.stages.Compiled, Any]:
  """Returns our program with weights stored by a recipe, and its variables."""
  rules = served_einsum.serving_recipe(recipes.find_recipe(recipe))
  model = decoder_lm_workload.make_model(
    workload.config,
    scan=workload.scan,
    make_einsum=lambda: served_einsum.ServedEinsum(rules),
  )
  ids = both.prompts

  def convert(values: Any) -> Any:
    ones = jnp.ones_like(ids)
    mutable = [served_einsum.COLLECTION]
    return model.apply(values, ids, ones, ones, mutable=mutable)[1]

  params = decoder_lm_workload.from_pure_jax(both.their_values)
  served = variables.unbox(jax.jit(convert)({"params": params}))
  floats: dict[str, Any] = traverse_util.flatten_dict(
    {"params": params}, sep="/"
  )
  stored = traverse_util.flatten_dict(served, sep="/")
  names = {served_einsum.stored_parameter(name) for name in stored}
  shapes = {name: floats.pop(name).shape for name in names if name is not None}

  def run(values: Any, *arrays: jax.Array) -> jax.Array:
    # Nothing reads the float kernels.
    absent = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    whole = traverse_util.unflatten_dict({**values, **absent}, sep="/")
    return _generate(model, workload.length, whole, *arrays)

  values = floats | stored
  return jax.jit(run).lower(values, ids, both.lengths).compile(), values


def _compare(
  ours: Callable[[], object],
  theirs: Callable[[], object],
  second: str,
  limit: float | None,
  workload: decoder_lm_workload.Workload,
  name: str,
  rounds: int,
) -> timing.Comparison:
  pairs = timing.interleave(ours, theirs, rounds=rounds)
  new = workload.global_batch_size * workload.length
  return timing.Comparison(
    case=name,
    first="our generation",
    second=second,
    pairs=pairs,
    limit=limit,
    facts={
      **workload.facts(),
      "new": workload.length,
      "new tokens/s": new / min(pairs.first),
    },
  )
