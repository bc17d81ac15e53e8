"""The model and train step of `pure_jax_decoder_lm` in flax.linen and optax.

What a user of these libraries would write: `nn.DenseGeneral`, `nn.RMSNorm`,
`nn.dot_product_attention`, a `TrainState`, and an optimizer composed of optax's
transformations. It shares no code with Paxon. Parameters are stored in float32,
matmuls are in the dtype of the model, and logits are converted to float32.

Layers are unrolled: on a CPU that is faster than `nn.scan`, and compiles no
slower at the sizes of the bench.
"""

from collections.abc import Mapping
import functools
from typing import Any

from flax import linen as nn
from flax import traverse_util
from flax.training import train_state
import jax
import jax.numpy as jnp
import optax

Arrays = Mapping[str, jax.Array]


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  """Returns heads [B,T,N,H] rotated by angles [B,T,1,H/2]."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = a * cos - b * sin, b * cos + a * sin
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Layer(nn.Module):
  """A pre-norm decoder layer; `config` is a `pure_jax_decoder_lm.Config`."""

  config: Any

  @nn.compact
  def __call__(self, x: jax.Array, mask: Any, turn: Any) -> jax.Array:
    """Returns the residual stream [B,T,D] after the layer."""
    c = self.config
    dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=c.dtype)
    y = nn.RMSNorm(dtype=c.dtype, name="attention_norm")(x)
    q = dense((c.num_heads, c.head_dim), name="q")(y)
    k = dense((c.num_kv_heads, c.head_dim), name="k")(y)
    v = dense((c.num_kv_heads, c.head_dim), name="v")(y)
    q, k = rotate(q, *turn), rotate(k, *turn)
    groups = c.num_heads // c.num_kv_heads
    k, v = (jnp.repeat(a, groups, axis=2) for a in (k, v))
    y = nn.dot_product_attention(
      q, k, v, mask=mask, force_fp32_for_softmax=True
    )
    x += dense(c.embed_dim, axis=(-2, -1), name="out")(y)
    y = nn.RMSNorm(dtype=c.dtype, name="mlp_norm")(x)
    gate, up = (dense(c.mlp_dim, name=name)(y) for name in ("gate", "up"))
    return x + dense(c.embed_dim, name="down")(nn.silu(gate) * up)


class Decoder(nn.Module):
  """The whole model; `config` is a `pure_jax_decoder_lm.Config`."""

  config: Any

  @nn.compact
  def __call__(self, batch: Arrays) -> jax.Array:
    """Returns logits [B,T,V], float32."""
    c, segments = self.config, batch["segment_ids"]
    mask = nn.combine_masks(
      nn.make_causal_mask(segments, dtype=bool),
      nn.make_attention_mask(segments, segments, jnp.equal, dtype=bool),
      dtype=bool,
    )
    speed = 1e4 ** -(jnp.arange(0, c.head_dim, 2) / c.head_dim)
    positions = batch["positions"].astype(jnp.float32)
    angle = jnp.einsum("BT,H->BTH", positions, speed)[:, :, None]
    turn = jnp.sin(angle), jnp.cos(angle)
    embed = nn.Embed(c.vocab_size, c.embed_dim, dtype=c.dtype, name="embed")
    x = embed(batch["inputs"]) * c.embed_dim**0.5
    for i in range(c.num_layers):
      x = Layer(c, name=f"layer_{i}")(x, mask, turn)
    x = nn.RMSNorm(dtype=c.dtype, name="final_norm")(x)
    return embed.attend(x).astype(jnp.float32)


def from_pure_jax(params: Arrays) -> dict[str, Any]:
  """Returns parameters of `pure_jax_decoder_lm` as those of `Decoder`."""
  outer = {
    "embed": {"embedding": params["table"]},
    "final_norm": {"scale": params["final_norm"]},
  }
  return outer | {
    f"layer_{i}": {
      name: {"scale" if name.endswith("norm") else "kernel": x[i]}
      for name, x in params.items()
      if name not in ("table", "final_norm")
    }
    for i in range(params["q"].shape[0])
  }


def make_schedule(c: Any) -> optax.Schedule:
  """Returns the schedule of the learning rate."""
  return optax.warmup_cosine_decay_schedule(
    init_value=c.peak / (c.warmup_steps + 1),
    peak_value=c.peak,
    warmup_steps=c.warmup_steps,
    decay_steps=c.total_steps,
    end_value=0.05 * c.peak,
  )


def initial_state(c: Any, params: Arrays) -> train_state.TrainState:
  """Returns the state of step 0 with parameters of `pure_jax_decoder_lm`."""
  has_decay = functools.partial(
    traverse_util.path_aware_map, lambda path, _: path[-1] != "scale"
  )
  adamw = optax.adamw(
    make_schedule(c), b2=c.b2, weight_decay=c.weight_decay, mask=has_decay
  )
  state = train_state.TrainState.create(
    apply_fn=Decoder(c).apply,
    params=from_pure_jax(params),
    tx=optax.chain(optax.clip_by_global_norm(1.0), adamw),
  )
  return state.replace(step=jnp.int32(0))


def train_step(
  state: train_state.TrainState, batch: Arrays, c: Any
) -> tuple[train_state.TrainState, dict[str, Any]]:
  """Returns the state after one update, and metrics."""
  share = batch["weights"] / jnp.sum(batch["weights"])

  def loss(params: Any) -> tuple[jax.Array, jax.Array]:
    logits = state.apply_fn({"params": params}, batch)
    labels = batch["targets"]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    hits = jnp.argmax(logits, axis=-1) == labels
    return jnp.sum(each * share), jnp.sum(share, where=hits)

  (mean, hits), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
  metrics = {
    "loss": mean,
    "accuracy": hits,
    "grad_norm": optax.tree.norm(grads),
    "param_norm": optax.tree.norm(state.params),
    "learning_rate": make_schedule(c)(state.step),
  }
  return state.apply_gradients(grads=grads), metrics


def compile_step(
  c: Any, state: train_state.TrainState, batch: Arrays
) -> jax.stages.Compiled:
  """Compiles the train step for such arguments; it donates the state."""
  step = jax.jit(functools.partial(train_step, c=c), donate_argnums=0)
  return step.lower(state, batch).compile()
