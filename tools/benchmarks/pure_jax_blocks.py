"""Blocks in plain JAX: baselines of the block cases.

Parameters have the names and layouts of our layers. Each function returns the
output and the means and variances of its batch norms.
"""

import jax
import jax.numpy as jnp

EPSILON = 1e-6
CHUNK_LENGTH = 64


def residual_block(params, x):
  """Returns relu(x + branch(x)) with two 3 x 3 convolutions and batch norms."""
  y, first = _batch_norm(
    params["conv_in"]["norm"], _conv(params["conv_in"]["conv"]["kernel"], x)
  )
  y = _conv(params["conv_mid"]["conv"]["kernel"], jax.nn.relu(y))
  y, second = _batch_norm(params["conv_mid"]["norm"], y)
  return jax.nn.relu(x + y), (first, second)


def transformer_block(params, x):
  """Returns a pre-norm block with attention that is not causal, and GELU."""
  y = layer_norm(params["attention_norm"], x)
  x = x + _attention(params["attention"], y)
  y = layer_norm(params["feed_forward_norm"], x)
  y = _feed_forward(params["feed_forward"], y, jax.nn.gelu)
  return x + y, ()


def conformer_block(params, x):
  """Returns a block of the Conformer: half, attention, convolution, half."""

  def half(name, x):
    y = layer_norm(params[f"{name}_norm"], x)
    return x + 0.5 * _feed_forward(params[name], y, jax.nn.silu)

  x = half("first", x)
  y = layer_norm(params["attention_norm"], x)
  x = x + _attention(params["attention"], y)
  y = layer_norm(params["convolution_norm"], x)
  y, moments = _light_convolution(params["convolution"], y)
  x = half("last", x + y)
  return layer_norm(params["final_norm"], x), (moments,)


def lstm(params, x):
  """Returns the outputs of an LSTM, a loop over tokens."""
  batch, length, _ = x.shape
  size = params["bias"].shape[-1]
  kernel = params["recurrent"].reshape(size, -1)
  inputs = params["input"].reshape(x.shape[-1], -1)
  gates = (x.reshape(batch * length, -1) @ inputs).reshape(batch, length, -1)
  gates = jnp.swapaxes(gates + params["bias"].reshape(-1), 0, 1)

  def step(carry, gates):
    hidden, cell = carry
    update, admit, forget, out = jnp.split(gates + hidden @ kernel, 4, -1)
    sigmoid = jax.nn.sigmoid
    cell = sigmoid(forget) * cell + sigmoid(admit) * jnp.tanh(update)
    hidden = sigmoid(out) * jnp.tanh(cell)
    return (hidden, cell), hidden

  zeros = jnp.zeros((batch, size))
  _, y = jax.lax.scan(step, (zeros, zeros), gates)
  return jnp.swapaxes(y, 0, 1), ()


def mamba2_block(params, x):
  """Returns a pre-norm block of Mamba-2 whose heads share keys and queries."""
  p = params["mixer"]
  y = rms_norm(params["norm"]["scale"], x)
  gate, value, key, query, step = (
    _project(y, p[name]) for name in ("gate", "value", "key", "query", "step")
  )
  value, key, query = (
    jax.nn.silu(_convolve(p[f"{name}_conv"], y))
    for name, y in (("value", value), ("key", key), ("query", query))
  )
  step = jax.nn.softplus(step + p["step_offset"])
  decay = -jnp.exp(p["log_rate"]) * step
  mixed = _scan_chunks(value * step[..., None], decay, key[:, :, 0], query)
  mixed = (mixed + value * p["skip"][:, None]) * jax.nn.silu(gate)
  flat = mixed.reshape(*x.shape[:2], -1)
  flat = rms_norm(p["norm"]["scale"].reshape(-1), flat)
  return x + flat @ p["out"].reshape(-1, x.shape[-1]), ()


def _scan_chunks(value, decay, key, query):
  """Returns the outputs of a state-space recurrence (SSD), [B,T,N,P]."""
  batch, length, heads, _ = value.shape
  size = min(CHUNK_LENGTH, length)

  def split(x):
    return x.reshape(batch, length // size, size, *x.shape[2:])

  value, decay, key, query = map(split, (value, decay, key, query[:, :, 0]))
  total = jnp.cumsum(decay, 2)
  by_head = jnp.swapaxes(total, 2, 3)
  gap = by_head[..., None] - by_head[..., None, :]
  causal = jnp.tril(jnp.ones((size, size), bool))
  scores = jnp.einsum("BCQS,BCKS->BCQK", query, key)
  weights = scores[:, :, None] * jnp.exp(jnp.where(causal, gap, -jnp.inf))
  y = jnp.einsum("BCNQK,BCKNP->BCQNP", weights, value)
  left = value * jnp.exp(total[:, :, -1:] - total)[..., None]
  added = jnp.einsum("BCKNP,BCKS->CBNPS", left, key)
  kept = jnp.moveaxis(jnp.exp(total[:, :, -1]), 1, 0)[..., None, None]

  def advance(state, chunk):
    return state * chunk[1] + chunk[0], state

  _, states = jax.lax.scan(advance, jnp.zeros_like(added[0]), (added, kept))
  carried = jnp.einsum("BCQS,CBNPS->BCQNP", query, states)
  y += carried * jnp.exp(total)[..., None]
  return y.reshape(batch, length, heads, -1)


def _project(x, kernel):
  y = x.reshape(-1, x.shape[-1]) @ kernel.reshape(x.shape[-1], -1)
  return y.reshape(*x.shape[:2], *kernel.shape[1:])


def _convolve(p, x):
  width, length = len(p["kernel"]), x.shape[1]
  every = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0), (0, 0)))
  y = sum(every[:, k : k + length] * p["kernel"][k] for k in range(width))
  return y + p["bias"]


def vector_quantizer(params, x):
  """Returns the nearest codes of normalized vectors, plus the loss."""
  stop, codebook = jax.lax.stop_gradient, _normalize(params["codebook"][0])
  z = _normalize(x)
  flat = z.reshape(-1, z.shape[-1])
  nearest = jnp.argmax(stop(flat @ codebook.T), -1)
  values = codebook[nearest].reshape(z.shape)
  distance = jnp.sum(jnp.square(stop(z) - values), -1)
  commitment = jnp.sum(jnp.square(z - stop(values)), -1)
  return z + stop(values - z) + jnp.mean(distance + 0.25 * commitment), ()


def _normalize(x):
  return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-12)


def rms_norm(scale, x):
  """Returns the normalized `x` with a scale."""
  mean_square = jnp.mean(x * x, -1, keepdims=True)
  return x * jax.lax.rsqrt(mean_square + EPSILON) * scale


def _light_convolution(p, x):
  up = x @ p["up"] + p["up_bias"]
  gate = x @ p["gate"] + p["gate_bias"]
  y = jax.lax.conv_general_dilated(
    up * jax.nn.sigmoid(gate),
    p["convolution"]["kernel"],
    (1,),
    "SAME",
    dimension_numbers=("NTC", "TIO", "NTC"),
    feature_group_count=up.shape[-1],
  )
  y, moments = _batch_norm(p["norm"], y + p["convolution"]["bias"])
  return jax.nn.silu(y) @ p["down"] + p["down_bias"], moments


def _conv(kernel, x):
  return jax.lax.conv_general_dilated(
    x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )


def _batch_norm(p, x):
  axes = tuple(range(x.ndim - 1))
  mean = jnp.mean(x, axes)
  centered = x - mean
  variance = jnp.mean(jnp.square(centered), axes)
  scale = jax.lax.rsqrt(variance + EPSILON) * p["scale"]
  return centered * scale + p["bias"], (mean, variance)


def layer_norm(p, x):
  """Returns the normalized `x`, with scale and bias."""
  x = x - jnp.mean(x, -1, keepdims=True)
  x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON)
  return x * p["scale"] + p["bias"]


def _attention(p, x):
  query, key, value = (
    jnp.einsum("BTD,DNH->BTNH", x, p[name])
    for name in ("query", "key", "value")
  )
  query *= query.shape[-1] ** -0.5
  logits = jnp.einsum("BTNH,BSNH->BNTS", query, key)
  context = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(logits), value)
  return jnp.einsum("BTNH,NHD->BTD", context, p["out"])


def _feed_forward(p, x, activation):
  hidden = activation(x @ p["up"] + p["up_bias"])
  return hidden @ p["down"] + p["down_bias"]
