"""A Llama train step in plain JAX, to compare plans with.

`python -m paxon.tasks.plans.hand_written TARGET SIZES TEXT` compiles it for
absent devices, writes the compiled text and prints what XLA says of its memory,
as JSON. SIZES is the JSON of `Sizes`. The step uses no layer, learner or
sharding rule of Paxon: only the devices and the compiler's options are shared.

Weights are split over `fsdp` by their width, the batch by sequences. A layer
saves its input. Matmuls are bfloat16 and accumulate in float32; so do gradients
of the head.

Letters: B batch, T and S positions, D width, N heads, H head, F feed-forward,
V vocabulary, L layers.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.runner.plan import target as targets
from paxon.runner.plan import topology

_BF16 = jnp.bfloat16
_F32 = jnp.float32
_SPLIT = jax.P("fsdp")
_Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes of the model and the batch, named like the knobs of experiments."""

  num_layers: int
  embed_dim: int
  mlp_dim: int
  num_heads: int
  head_dim: int
  vocab_size: int
  global_batch_size: int
  length: int

  @property
  def weights(self) -> dict[str, tuple[tuple[int, ...], jax.P]]:
    """Shapes and shardings, stacked for layers."""
    layers, width, mlp = self.num_layers, self.embed_dim, self.mlp_dim
    heads = self.num_heads, self.head_dim
    inner = jax.P(None, "fsdp")
    return {
      "embedding": ((self.vocab_size, width), inner),
      "head": ((width, self.vocab_size), _SPLIT),
      "norm": ((width,), _SPLIT),
      "attention_norm": ((layers, width), inner),
      "mlp_norm": ((layers, width), inner),
      "query": ((layers, width, *heads), inner),
      "key": ((layers, width, *heads), inner),
      "value": ((layers, width, *heads), inner),
      "out": ((layers, *heads, width), jax.P(None, None, None, "fsdp")),
      "gate": ((layers, width, mlp), inner),
      "up": ((layers, width, mlp), inner),
      "down": ((layers, mlp, width), jax.P(None, None, "fsdp")),
    }

  @property
  def layer_weights(self) -> int:
    """Weights of the matmuls of all layers."""
    attention = 4 * self.embed_dim * self.num_heads * self.head_dim
    mlp = 3 * self.embed_dim * self.mlp_dim
    return self.num_layers * (attention + mlp)

  @property
  def flops(self) -> int:
    """FLOPs of a step: 6 a weight and token, and attention without a mask."""
    tokens = self.global_batch_size * self.length
    weights = self.layer_weights + self.embed_dim * self.vocab_size
    pairs = tokens * self.length * self.num_heads * self.head_dim
    return 6 * weights * tokens + 12 * self.num_layers * pairs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wide(
  equation: str, gradient: Any, x: jax.Array, y: jax.Array
) -> jax.Array:
  """A float32 result of bfloat16 operands, with bfloat16 backward matmuls.

  The gradient of `y` has the dtype `gradient`.
  """
  return jnp.einsum(
    equation, x.astype(_BF16), y.astype(_BF16), preferred_element_type=_F32
  )


def _wide_forward(equation: str, gradient: Any, x: Any, y: Any) -> Any:
  y = y.astype(_BF16)
  return _wide(equation, gradient, x, y), (x, y)


def _wide_backward(equation: str, gradient: Any, saved: Any, bar: Any) -> Any:
  (x, y), bar = saved, bar.astype(_BF16)
  operands, result = equation.split("->")
  of_x, of_y = operands.split(",")
  return jnp.einsum(f"{result},{of_y}->{of_x}", bar, y), jnp.einsum(
    f"{of_x},{result}->{of_y}", x, bar, preferred_element_type=gradient
  )


_wide.defvjp(_wide_forward, _wide_backward)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  wide = x.astype(_F32)
  mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  normal = wide * jax.lax.rsqrt(mean + 1e-5)
  return (normal * scale[None, None].astype(_F32)).astype(x.dtype)


def _rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
  half = x.shape[-1] // 2
  rates = 10_000.0 ** (-jnp.arange(half, dtype=_F32) / half)
  angles = positions[:, :, None, None].astype(_F32) * rates[None, None, None]
  a, b = jnp.split(x.astype(_F32), 2, axis=-1)
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


def _layer(x: jax.Array, weights: _Arrays, batch: _Arrays) -> jax.Array:
  w = jax.tree.map(lambda weight: weight.astype(_BF16), weights)
  positions, segments = batch["positions"], batch["segment_ids"]
  y = _norm(x, w["attention_norm"])
  query, key, value = (
    jnp.einsum("BTD,DNH->BTNH", y, w[name])
    for name in ("query", "key", "value")
  )
  query, key = _rotate(query, positions), _rotate(key, positions)
  logits = _wide("BTNH,BSNH->BNTS", _BF16, query, key) * query.shape[-1] ** -0.5
  visible = (
    (positions[:, :, None] >= positions[:, None])
    & (segments[:, :, None] == segments[:, None])
    & (segments[:, None] > 0)
  )
  logits = jnp.where(visible[:, None], logits, float(jnp.finfo(_F32).min))
  shares = jax.nn.softmax(logits).astype(_BF16)
  context = jnp.einsum("BNTS,BSNH->BTNH", shares, value)
  x = _split(x + jnp.einsum("BTNH,NHD->BTD", context, w["out"]))
  y = _norm(x, w["mlp_norm"])
  return _split(x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"])


def _split(x: jax.Array) -> jax.Array:
  return jax.lax.with_sharding_constraint(x, _SPLIT)


def _loss(weights: _Arrays, batch: _Arrays) -> tuple[jax.Array, jax.Array]:
  """Returns the mean loss, and the number of bytes of the targets."""
  table = jax.lax.with_sharding_constraint(
    weights["embedding"].astype(_BF16), jax.P()
  )
  x = _split(table[batch["inputs"]])

  @functools.partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.nothing_saveable,
    prevent_cse=False,
  )
  def layer(x: jax.Array, weights: _Arrays) -> tuple[jax.Array, None]:
    return _layer(x, weights, batch), None

  single = ("embedding", "head", "norm")
  stacked = {k: weight for k, weight in weights.items() if k not in single}
  x = _norm(jax.lax.scan(layer, x, stacked)[0], weights["norm"])
  logits = _wide("BTD,DV->BTV", _F32, x, weights["head"])
  ids = jnp.arange(logits.shape[-1])[None, None]
  is_target = ids == batch["targets"][..., None]
  nll = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(
    jnp.where(is_target, logits, 0.0), axis=-1
  )
  total = jnp.sum(nll * batch["weights"])
  return total / jnp.sum(batch["weights"]), jnp.sum(batch["target_bytes"])


def _step(state: _Arrays, batch: _Arrays) -> tuple[_Arrays, _Arrays]:
  """AdamW with gradients clipped to a global norm of 1."""
  (loss, num_bytes), gradients = jax.value_and_grad(_loss, has_aux=True)(
    state["weights"], batch
  )
  norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
  step = state["step"] + 1
  updates = step.astype(_F32)
  groups = ("weights", "first", "second")

  def update(name: str) -> Any:
    w, first, second = (state[group][name] for group in groups)
    gradient = gradients[name] * jnp.minimum(1.0, 1.0 / norm)
    first = 0.9 * first + 0.1 * gradient
    second = 0.95 * second + 0.05 * jnp.square(gradient)
    direction = (first / (1 - 0.9**updates)) / (
      jnp.sqrt(second / (1 - 0.95**updates)) + 1e-8
    )
    return w - 3e-4 * (direction + 0.1 * w), first, second

  found = {name: update(name) for name in gradients}
  new = {
    group: {name: values[i] for name, values in found.items()}
    for i, group in enumerate(groups)
  }
  counts = {name: state[name] + 1 for name in ("step", "count", "schedule")}
  metrics = {"loss": loss, "grad_norm": norm, "bytes": num_bytes}
  return new | counts, metrics


def _compile(target: targets.Target, sizes: Sizes) -> jax.stages.Compiled:
  devices = np.array(topology.devices(target))
  mesh = jax.sharding.Mesh(
    devices.reshape(-1), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)
  )

  def array(shape: tuple[int, ...], dtype: Any, spec: jax.P) -> Any:
    sharding = jax.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  weights = {
    name: array(shape, _F32, spec)
    for name, (shape, spec) in sizes.weights.items()
  }
  state = dict.fromkeys(("weights", "first", "second"), weights)
  # Numbers of steps, as Paxon and two transformations of optax count them.
  counts = ("step", "count", "schedule")
  state |= dict.fromkeys(counts, array((), jnp.int32, jax.P()))
  shape = sizes.global_batch_size, sizes.length
  names = "inputs", "targets", "positions", "segment_ids", "target_bytes"
  batch = dict.fromkeys(names, array(shape, jnp.int32, _SPLIT))
  batch["weights"] = array(shape, _F32, _SPLIT)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
  step = jax.jit(
    _step,
    donate_argnums=0,
    out_shardings=(shardings, jax.NamedSharding(mesh, jax.P())),
  )
  with jax.set_mesh(mesh):
    return topology.compile_for(target, step.trace(state, batch), mesh)


def main(arguments: list[str]) -> int:
  """Compiles for a target, prints the memory and writes the text."""
  target, sizes, text = arguments
  compiled = _compile(targets.parse(target), Sizes(**json.loads(sizes)))
  found = compiled.memory_analysis()
  assert found is not None
  pathlib.Path(text).write_text(compiled.as_text() or "")
  memory = {
    "arguments": found.argument_size_in_bytes,
    "temporaries": found.temp_size_in_bytes,
    "peak": found.peak_memory_in_bytes,
  }
  print(json.dumps(memory))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
