"""Cases of a mixture of experts: one layer, forward and backward.

Both contenders have the same parameters, tokens and gradient of the output.
"""

from collections.abc import Callable
import dataclasses
import importlib
from typing import Any

from flax import linen as nn
import jax
import numpy as np

from paxon.layers.moe import experts, mixture, routers
from paxon.tools.benchmarks import (
  decoder_lm_workload,
  pure_jax_mixture,
  timing,
)

NUM_EXPERTS, NUM_CHOICES = 8, 2
JAX_LIMIT = 1.05
TORCH_LIMIT = 1.0

Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """The layer of a workload, and its arguments.

  Attributes:
    workload: Gives batch, length, embed_dim and mlp_dim.
    values: Our parameters.
    x: Tokens [B,T,D].
    gradient: Gradient of the output [B,T,D].
  """

  workload: decoder_lm_workload.Workload
  values: Any
  x: jax.Array
  gradient: jax.Array


def make_layer(workload: decoder_lm_workload.Workload) -> Layer:
  """Returns the layer with random values."""
  batch, length = workload.global_batch_size, workload.length
  shape = (batch, length, workload.config.embed_dim)
  first, second, third = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(first, shape)
  made = nn.unbox(jax.jit(_module(workload).init)(second, x))
  return Layer(
    workload=workload,
    values=made["params"],
    x=x,
    gradient=jax.random.normal(third, shape),
  )


def our_step(layer: Layer) -> Step:
  """Returns `() -> ((y, dx), gradients)` by our layer, gradients by name."""
  module = _module(layer.workload)

  def run(values: Any, x: jax.Array) -> Any:
    return module.apply({"params": values}, x)

  step = _compile(run, layer.values, layer)

  def named() -> Any:
    y, (values, dx) = step()
    return (y, dx), _by_name(values)

  return named


def pure_jax_step(layer: Layer) -> Step:
  """Returns the same by plain JAX."""

  def run(values: Any, x: jax.Array) -> jax.Array:
    tokens = x.reshape(-1, x.shape[-1])
    y = pure_jax_mixture.mixture(values, tokens, k=NUM_CHOICES)
    return y.reshape(x.shape)

  step = _compile(run, _by_name(layer.values), layer)

  def named() -> Any:
    y, (values, dx) = step()
    return (y, dx), values

  return named


def torch_step(layer: Layer) -> Step:
  """Returns the same by Mixtral's block of transformers, in torch.

  Raises:
    ImportError: torch or transformers is not installed.
  """
  torch = importlib.import_module("torch")
  library = importlib.import_module("transformers")
  blocks = importlib.import_module(
    "transformers.models.mixtral.modeling_mixtral"
  )
  config = library.MixtralConfig(
    hidden_size=layer.workload.config.embed_dim,
    intermediate_size=layer.workload.config.mlp_dim,
    num_local_experts=NUM_EXPERTS,
    num_experts_per_tok=NUM_CHOICES,
  )
  block = blocks.MixtralSparseMoeBlock(config)
  values = {
    name: torch.tensor(np.asarray(value))
    for name, value in _by_name(layer.values).items()
  }
  stored = {
    "gate.weight": values["router"].T,
    "experts.gate_up_proj": torch.cat(
      [values["gate"].mT, values["up"].mT], dim=1
    ),
    "experts.down_proj": values["down"].mT,
  }
  block.load_state_dict({k: v.contiguous() for k, v in stored.items()})
  x = torch.tensor(np.asarray(layer.x), requires_grad=True)
  gradient = torch.tensor(np.asarray(layer.gradient))
  width = layer.workload.config.mlp_dim

  def step() -> Any:
    x.grad = None
    block.zero_grad(set_to_none=True)
    out = block(x)
    y = out[0] if isinstance(out, tuple) else out
    y.backward(gradient)
    found = dict(block.named_parameters())
    both = found["experts.gate_up_proj"].grad.mT
    return (y.detach(), x.grad), {
      "router": found["gate.weight"].grad.T,
      "gate": both[..., :width],
      "up": both[..., width:],
      "down": found["experts.down_proj"].grad.mT,
    }

  return step


def run(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int
) -> timing.Comparison:
  """Returns the time of our layer over that of plain JAX."""
  layer = make_layer(workload)
  return _compare(
    layer, pure_jax_step(layer), "plain JAX", JAX_LIMIT, name, rounds
  )


def run_torch(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int
) -> timing.Comparison:
  """Returns the time of our layer over that of transformers in torch."""
  layer = make_layer(workload)
  step = torch_step(layer)
  return _compare(layer, step, "transformers", TORCH_LIMIT, name, rounds)


def _compare(
  layer: Layer, other: Step, second: str, limit: float, name: str, rounds: int
) -> timing.Comparison:
  ours = our_step(layer)
  workload = layer.workload
  return timing.Comparison(
    case=name,
    first="our mixture",
    second=second,
    pairs=timing.interleave(
      lambda: jax.block_until_ready(ours()),
      lambda: jax.block_until_ready(other()),
      rounds=rounds,
    ),
    limit=limit,
    facts={
      "tokens": workload.tokens,
      "embed": workload.config.embed_dim,
      "mlp": workload.config.mlp_dim,
      "experts": f"{NUM_CHOICES} of {NUM_EXPERTS}",
    },
  )


def _module(workload: decoder_lm_workload.Workload) -> nn.Module:
  return mixture.MixtureOfExperts(
    num_experts=NUM_EXPERTS,
    router=routers.TopK(k=NUM_CHOICES),
    experts=experts.GatedExperts(mlp_dim=workload.config.mlp_dim),
  )


def _compile(run: Callable[..., Any], values: Any, layer: Layer) -> Step:
  def both(values: Any, x: jax.Array, gradient: jax.Array) -> Any:
    y, backward = jax.vjp(run, values, x)
    return y, backward(gradient)

  args = (values, layer.x, layer.gradient)
  compiled = jax.jit(both).lower(*args).compile()
  return lambda: compiled(*args)


def _by_name(values: Any) -> dict[str, jax.Array]:
  return {**values["experts"], "router": values["router"]["logits"]["kernel"]}
