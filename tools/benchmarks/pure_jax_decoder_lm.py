"""A decoder-only language model and its train step in plain JAX, in one file.

What one would write by hand, without a framework: pre-norm blocks of rotary
grouped-query attention and a gated feed-forward, tied embeddings, AdamW with
warm-up and cosine decay to 5 %, clipping to norm 1. Layers are scanned, the
state is donated, matmuls are in `dtype`, accumulation and norms in float32.
Tokens are one matrix in matmuls, which is faster on CPUs.

Letters: batch B, length T S, embed D, heads N, key/value heads K, head_dim H.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]
Forward = Any  # (parameters, batch, config) -> logits [B,T,V], float32.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def einsum32(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Multiplies into float32; gradients are rounded to the dtype of inputs."""
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


@einsum32.defjvp
def _(equation: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
  (x, y), (dx, dy) = primals, tangents
  narrow = jnp.einsum(equation, dx, y) + jnp.einsum(equation, x, dy)
  return einsum32(equation, x, y), narrow.astype(jnp.float32)


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns `x @ w`; rounds sums in float32, in its gradients too."""
  return einsum32("MD,DF->MF", x, w).astype(x.dtype)


matmul.defvjp(
  lambda x, w: (matmul(x, w), (x, w)),
  lambda xw, dy: (matmul(dy, xw[1].T), matmul(xw[0].T, dy)),
)


def project(x: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies the last axes of tokens [B,T,...] with the first of a kernel."""
  tokens = x.reshape(x.shape[0] * x.shape[1], -1)
  y = matmul(tokens, w.reshape(tokens.shape[1], -1))
  return y.reshape(*x.shape[:2], *w.shape[x.ndim - 2 :])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Sizes of the model and hyperparameters."""

  vocab_size: int
  num_layers: int
  embed_dim: int
  mlp_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  dtype: str = "float32"
  peak: float = 4e-3
  warmup_steps: int = 50
  total_steps: int = 1000
  b2: float = 0.99
  weight_decay: float = 0.1


def initial_state(c: Config, key: jax.Array) -> dict[str, Any]:
  """Returns step, parameters and moments; all float32 but the step."""
  L, D, F, H = c.num_layers, c.embed_dim, c.mlp_dim, c.head_dim
  shapes = {"table": (c.vocab_size, D), "gate": (L, D, F), "up": (L, D, F)}
  shapes |= {"down": (L, F, D), "out": (L, c.num_heads, H, D)}
  shapes |= {"q": (L, D, c.num_heads, H), "k": (L, D, c.num_kv_heads, H)}
  shapes |= {"v": shapes["k"]}
  fan_in = {"down": F, "out": c.num_heads * H}
  keys = iter(jax.random.split(key, len(shapes)))
  params = {
    name: jax.random.normal(next(keys), shape) / fan_in.get(name, D) ** 0.5
    for name, shape in shapes.items()
  }
  norms = {"attention_norm": (L, D), "mlp_norm": (L, D), "final_norm": (D,)}
  params |= {name: jnp.ones(shape) for name, shape in norms.items()}
  mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
  return {"step": jnp.int32(0), "params": params, "mu": mu, "nu": nu}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns the RMS norm of `x` [B,T,D], times `scale`."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
  return (y * scale[None, None]).astype(x.dtype)


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  """Returns heads [B,T,N,H] rotated by angles [B,T,1,H/2]."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = a * cos - b * sin, b * cos + a * sin
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention(x: jax.Array, w: Arrays, mask: Any, turn: Any) -> jax.Array:
  """Returns the attention output of `x` [B,T,D]."""
  q, k, v = (project(x, w[name]) for name in "qkv")
  (B, T, N, H), K = q.shape, k.shape[2]
  q, k = rotate(q, *turn).reshape(B, T, K, N // K, H), rotate(k, *turn)
  scores = einsum32("BTKGH,BSKH->BKGTS", q, k) * H**-0.5
  scores = jnp.where(mask[:, None, None], scores, -1e30)
  shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
  y = jnp.einsum("BKGTS,BSKH->BTKGH", shares, v).reshape(B, T, N, H)
  return project(y, w["out"])


def forward(params: Arrays, batch: Arrays, c: Config) -> jax.Array:
  """Returns logits [B,T,V], float32."""
  positions, segments = batch["positions"], batch["segment_ids"]
  mask = positions[:, :, None] >= positions[:, None, :]
  mask &= segments[:, :, None] == segments[:, None, :]
  speed = 1e4 ** -(jnp.arange(0, c.head_dim, 2) / c.head_dim)
  angle = jnp.einsum("BT,H->BTH", positions.astype(speed.dtype), speed)
  turn = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]

  def layer(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
    w = {n: p.astype(c.dtype) if p.ndim > 1 else p for n, p in w.items()}
    x += attention(norm(x, w["attention_norm"]), w, mask, turn)
    y = norm(x, w["mlp_norm"])
    y = jax.nn.silu(project(y, w["gate"])) * project(y, w["up"])
    return x + project(y, w["down"]), None

  w = dict(params)
  table, scale = w.pop("table").astype(c.dtype), w.pop("final_norm")
  x = table[batch["inputs"]] * c.embed_dim**0.5
  x = norm(jax.lax.scan(layer, x, w)[0], scale)
  return einsum32("BTD,VD->BTV", x, table)


def loss(params: Arrays, batch: Arrays, c: Config, run: Forward) -> Any:
  """Returns the mean loss in nats, and metrics."""
  logits, targets = run(params, batch, c), batch["targets"]
  chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  share = batch["weights"] / jnp.sum(batch["weights"])
  mean = jnp.sum((jax.nn.logsumexp(logits, axis=-1) - chosen) * share)
  hits = jnp.sum(jnp.where(jnp.argmax(logits, axis=-1) == targets, share, 0))
  return mean, {"loss": mean, "accuracy": hits}


def learning_rate(step: jax.Array, c: Config) -> jax.Array:
  """Returns the learning rate at `step`, a float."""
  warmup = (step + 1) / (c.warmup_steps + 1)
  done = (step - c.warmup_steps) / (c.total_steps - c.warmup_steps)
  cosine = 0.5 + 0.5 * jnp.cos(jnp.pi * jnp.minimum(done, 1))
  return c.peak * jnp.where(done < 0, warmup, 0.05 + 0.95 * cosine)


def train_step(state: Any, batch: Arrays, c: Config, run: Forward) -> Any:
  """Returns the state after one update, and metrics."""
  new: Any = {"step": state["step"] + 1, "params": {}, "mu": {}, "nu": {}}
  grads, metrics = jax.grad(loss, has_aux=True)(state["params"], batch, c, run)
  for name, tree in ("grad_norm", grads), ("param_norm", state["params"]):
    metrics[name] = jnp.sqrt(sum(jnp.sum(x * x) for x in tree.values()))
  clip = 1 / jnp.maximum(metrics["grad_norm"], 1)
  t = new["step"].astype(jnp.float32)
  metrics["learning_rate"] = rate = learning_rate(t - 1, c)
  for name, p in state["params"].items():
    g, m, v = clip * grads[name], state["mu"][name], state["nu"][name]
    m, v = 0.9 * m + 0.1 * g, c.b2 * v + (1 - c.b2) * g * g
    step = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - c.b2**t)) + 1e-8)
    decay = 0 if name.endswith("norm") else c.weight_decay
    new["params"][name] = p - rate * (step + decay * p)
    new["mu"][name], new["nu"][name] = m, v
  return new, metrics


def compile_step(
  c: Config, state: Any, batch: Arrays, *, forward: Forward = forward
) -> jax.stages.Compiled:
  """Compiles the train step for such arguments; it donates the state."""
  step = functools.partial(train_step, c=c, run=forward)
  return jax.jit(step, donate_argnums=0).lower(state, batch).compile()
