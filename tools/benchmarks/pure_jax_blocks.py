"""Blocks of images and speech in plain JAX: baselines of the block cases.

Parameters have the names and layouts of our layers. Each function returns the
output and the means and variances of its batch norms.
"""

import jax
import jax.numpy as jnp

EPSILON = 1e-6


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
