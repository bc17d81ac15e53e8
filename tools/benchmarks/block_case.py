"""Cases of single blocks that no language model has: a training step of each.

Forward pass, batch norms with their moments, and backward pass, of a mixture of
experts, a residual block, a block of a vision transformer, one of a Conformer,
an LSTM, a Mamba-2 block and a vector quantizer. Both contenders have the same
parameters, inputs and gradient of the output.
"""

from collections.abc import Callable, Mapping
import dataclasses
import importlib
import math
from typing import Any

from flax import linen as nn
import jax
import numpy as np

from paxon.layers import feed_forward, token_context
from paxon.layers.attention import grouped_query
from paxon.layers.attention import mask as attention_mask
from paxon.layers.moe import experts, mixture, routers
from paxon.layers.norms import batch_norm, layer_norm, rms_norm
from paxon.layers.quantizers import codes, vector
from paxon.layers.recurrent import cells, gated_norm, mamba2
from paxon.layers.speech import conformer
from paxon.layers.stacks import block
from paxon.layers.vision import convolutions, resnet
from paxon.tools.benchmarks import (
  decoder_lm_workload,
  pure_jax_blocks,
  pure_jax_mixture,
  timing,
  torch_decoder_lm,
)

JAX_LIMIT = 1.05
TORCH_LIMIT = 1.0
_WIDTH = 15
_NUM_CODES = 1024
_NUM_EXPERTS, _NUM_CHOICES = 8, pure_jax_mixture.NUM_CHOICES

Step = Callable[[], Any]
Workload = decoder_lm_workload.Workload


def _batch_norm() -> nn.Module:
  return batch_norm.BatchNorm(decay=0.9, epsilon=pure_jax_blocks.EPSILON)


def _layer_norm() -> nn.Module:
  return layer_norm.LayerNorm(epsilon=pure_jax_blocks.EPSILON)


def _attention(workload: Workload) -> nn.Module:
  c = workload.config
  return grouped_query.GroupedQueryAttention(
    num_heads=c.num_heads,
    num_kv_heads=c.num_heads,
    head_dim=c.head_dim,
    mask=attention_mask.MaskRules(causal=False),
  )


def _feed_forward(workload: Workload, activation: Any) -> nn.Module:
  return feed_forward.FeedForward(
    workload.config.mlp_dim, activation=activation
  )


def _mixture(workload: Workload) -> nn.Module:
  return mixture.MixtureOfExperts(
    num_experts=_NUM_EXPERTS,
    router=routers.TopK(k=_NUM_CHOICES),
    experts=experts.GatedExperts(mlp_dim=workload.config.mlp_dim),
  )


def _residual_block(workload: Workload) -> nn.Module:
  return resnet.BasicBlock(workload.config.embed_dim, norm=_batch_norm())


def _transformer_block(workload: Workload) -> nn.Module:
  return block.TransformerBlock(
    attention_norm=_layer_norm(),
    attention=_attention(workload),
    feed_forward_norm=_layer_norm(),
    feed_forward=_feed_forward(workload, nn.gelu),
  )


def _conformer_block(workload: Workload) -> nn.Module:
  return conformer.ConformerBlock(
    first_norm=_layer_norm(),
    first=_feed_forward(workload, nn.silu),
    attention_norm=_layer_norm(),
    attention=_attention(workload),
    convolution_norm=_layer_norm(),
    convolution=conformer.LightConvolution(
      convolutions.DepthwiseConv((_WIDTH,)), norm=_batch_norm()
    ),
    last_norm=_layer_norm(),
    last=_feed_forward(workload, nn.silu),
    final_norm=_layer_norm(),
  )


def _lstm(workload: Workload) -> nn.Module:
  return cells.Lstm(workload.config.embed_dim)


def _mamba2_block(workload: Workload) -> nn.Module:
  c = workload.config
  mixer = mamba2.Mamba2(
    num_heads=2 * c.num_heads,
    head_dim=c.head_dim,
    state_dim=c.head_dim,
    chunk_length=pure_jax_blocks.CHUNK_LENGTH,
    norm=gated_norm.GatedRmsNorm(epsilon=pure_jax_blocks.EPSILON),
  )
  norm = rms_norm.RmsNorm(epsilon=pure_jax_blocks.EPSILON)
  return block.MixerBlock(norm=norm, mixer=mixer)


def _vector_quantizer(workload: Workload) -> nn.Module:
  del workload
  return vector.VectorQuantizer(num_codes=_NUM_CODES)


def _add_loss(found: codes.Codes) -> jax.Array:
  # So that the codebook has gradients: those of values are of the input alone.
  return found.values + found.loss


@dataclasses.dataclass(frozen=True)
class _Kind:
  make: Callable[[Workload], nn.Module]
  pure_jax: Callable[..., Any]
  torch: str | Callable[["Block"], Step]
  rank: int = 3
  # torch.compile unrolls an LSTM over its tokens, which takes minutes.
  compiles_torch: bool = True
  output: Callable[[Any], jax.Array] = lambda y: y
  takes_context: bool = True


def _mixtral_step(of: "Block") -> Step:
  """Returns `torch_step` by Mixtral's block of transformers."""
  torch = torch_decoder_lm.import_torch()
  library = importlib.import_module("transformers")
  blocks = importlib.import_module(
    "transformers.models.mixtral.modeling_mixtral"
  )
  params = of.values["params"]
  width = params["experts"]["up"].shape[-1]
  config = library.MixtralConfig(
    hidden_size=of.x.shape[-1],
    intermediate_size=width,
    num_local_experts=_NUM_EXPERTS,
    num_experts_per_tok=_NUM_CHOICES,
  )
  layer = blocks.MixtralSparseMoeBlock(config)
  params = jax.tree.map(lambda v: torch.tensor(np.asarray(v)), params)
  values = params["experts"]
  stored = {
    "gate.weight": params["router"]["logits"]["kernel"].T,
    "experts.gate_up_proj": torch.cat(
      [values["gate"].mT, values["up"].mT], dim=1
    ),
    "experts.down_proj": values["down"].mT,
  }
  layer.load_state_dict({k: v.contiguous() for k, v in stored.items()})
  x = torch.tensor(np.asarray(of.x), requires_grad=True)
  gradient = torch.tensor(np.asarray(of.gradient))

  def step() -> Any:
    x.grad = None
    layer.zero_grad(set_to_none=True)
    out = layer(x)
    y = out[0] if isinstance(out, tuple) else out
    y.backward(gradient)
    found = {name: value.grad for name, value in layer.named_parameters()}
    both = found["experts.gate_up_proj"].mT
    gradients = {
      "gate": both[..., :width],
      "up": both[..., width:],
      "down": found["experts.down_proj"].mT,
    }
    router = {"logits": {"kernel": found["gate.weight"].T}}
    return y, {"experts": gradients, "router": router}, x.grad

  return step


KINDS: Mapping[str, _Kind] = {
  "moe": _Kind(
    _mixture, pure_jax_mixture.mixture, _mixtral_step, takes_context=False
  ),
  "residual_block": _Kind(
    _residual_block,
    pure_jax_blocks.residual_block,
    "residual_block",
    4,
    takes_context=False,
  ),
  "vit_block": _Kind(
    _transformer_block,
    pure_jax_blocks.transformer_block,
    "transformer_block",
  ),
  "conformer_block": _Kind(
    _conformer_block, pure_jax_blocks.conformer_block, "conformer_block"
  ),
  "lstm": _Kind(_lstm, pure_jax_blocks.lstm, "lstm", compiles_torch=False),
  "mamba2_block": _Kind(
    _mamba2_block, pure_jax_blocks.mamba2_block, "mamba2_block"
  ),
  "vector_quantizer": _Kind(
    _vector_quantizer,
    pure_jax_blocks.vector_quantizer,
    "vector_quantizer",
    output=_add_loss,
    takes_context=False,
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """A block with its arguments.

  Attributes:
    kind: Which block.
    module: Our layer.
    values: Our variables.
    x: Input: [B,T,D], or [B,H,W,D] with H = W and T = H * W.
    gradient: Gradient of the output.
  """

  kind: _Kind
  module: nn.Module
  values: Any
  x: jax.Array
  gradient: jax.Array


def make_block(workload: Workload, kind: str) -> Block:
  """Returns the block with random values."""
  found = KINDS[kind]
  batch, length = workload.global_batch_size, workload.length
  size = math.isqrt(length)
  space = (length,) if found.rank == 3 else (size, size)
  shape = (batch, *space, workload.config.embed_dim)
  first, second, third = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(first, shape)
  module = found.make(workload)
  return Block(
    kind=found,
    module=module,
    values=nn.unbox(jax.jit(module.init)(second, x)),
    x=x,
    gradient=jax.random.normal(third, shape),
  )


def our_step(of: Block) -> Step:
  """Returns `() -> (y, averages, gradients, dx)` by our layer."""
  averages = {k: v for k, v in of.values.items() if k != "params"}
  training: dict[str, Any] = {"deterministic": False}
  if of.kind.takes_context:
    training = {"context": token_context.TokenContext(**training)}

  def run(params: Any, x: jax.Array) -> Any:
    y, updates = of.module.apply(
      {**averages, "params": params}, x, **training, mutable=list(averages)
    )
    return of.kind.output(y), updates

  return _compile(run, of)


def pure_jax_step(of: Block) -> Step:
  """Returns the same by plain JAX, with the moments for the averages."""
  with jax.numpy_rank_promotion("allow"):
    return _compile(of.kind.pure_jax, of)


def _compile(run: Callable[..., Any], of: Block) -> Step:
  def both(params: Any, x: jax.Array, gradient: jax.Array) -> Any:
    y, backward, moments = jax.vjp(run, params, x, has_aux=True)
    return y, moments, *backward(gradient)

  args = (of.values["params"], of.x, of.gradient)
  compiled = jax.jit(both).lower(*args).compile()
  return lambda: compiled(*args)


def torch_step(of: Block, *, is_compiled: bool = True) -> Step:
  """Returns `() -> (y, gradients by path, dx)` in torch.

  Raises:
    ImportError: torch, or transformers for a mixture, is not installed.
  """
  if callable(of.kind.torch):
    return of.kind.torch(of)
  torch = torch_decoder_lm.import_torch()
  blocks = importlib.import_module("paxon.tools.benchmarks.torch_blocks")
  params = jax.tree.map_with_path(
    lambda k, v: torch.tensor(blocks.from_jax(k, v), requires_grad=True),
    of.values["params"],
  )
  fn = getattr(blocks, of.kind.torch)
  if is_compiled and of.kind.compiles_torch:
    fn = torch.compile(fn)
  leaves = [x for _, x in jax.tree.leaves_with_path(params)]
  x = torch.tensor(np.asarray(of.x), requires_grad=True)
  gradient = torch.tensor(np.asarray(of.gradient))

  def step() -> Any:
    y = fn(params, x)
    grads = torch.autograd.grad(y, [*leaves, x], gradient)
    return (
      y,
      jax.tree.unflatten(jax.tree.structure(params), grads[:-1]),
      grads[-1],
    )

  return step


def run(
  workload: Workload, *, name: str, rounds: int, kind: str, use_torch: bool
) -> timing.Comparison:
  """Returns the time of our block over that of plain JAX, or of torch.

  Raises:
    ImportError: See `torch_step`; only with `use_torch`.
  """
  of = make_block(workload, kind)
  ours = our_step(of)
  other = torch_step(of) if use_torch else pure_jax_step(of)
  second = "plain JAX"
  if use_torch and callable(of.kind.torch):
    second = "transformers"
  elif use_torch:
    second = "torch.compile" if of.kind.compiles_torch else "torch"
  return timing.Comparison(
    case=name,
    first="our block",
    second=second,
    pairs=timing.interleave(
      lambda: jax.block_until_ready(ours()),
      lambda: jax.block_until_ready(other()),
      rounds=rounds,
    ),
    limit=TORCH_LIMIT if use_torch else JAX_LIMIT,
    facts={
      "positions": workload.tokens,
      "embed": workload.config.embed_dim,
    },
  )
