"""Blocks of images and speech in torch: baselines of the block cases.

As one would write them by hand, with torch's fused attention. Parameters have
the names of our layers; kernels of convolutions have torch's layout.
"""

from typing import Any

import numpy as np
import torch  # pyrefly: ignore[missing-import]

from paxon.tools.benchmarks import pure_jax_blocks

F = torch.nn.functional
_EPSILON = pure_jax_blocks.EPSILON
Params = dict[str, Any]


def from_jax(value: Any) -> np.ndarray:
  """Returns a parameter; kernels of convolutions in torch's layout."""
  value = np.asarray(value)
  if value.ndim == 4:
    return np.ascontiguousarray(value.transpose(3, 2, 0, 1))
  # Kernels of three dimensions are those of attention, or depthwise.
  if value.ndim == 3 and value.shape[1] == 1:
    return np.ascontiguousarray(value.transpose(2, 1, 0))
  return value


def to_jax(value: Any, like: Any) -> np.ndarray:
  """Returns the inverse of `from_jax`, with the shape of `like`."""
  value = value.detach().numpy()
  if value.ndim == 4:
    value = value.transpose(2, 3, 1, 0)
  elif value.shape != like.shape:
    value = value.transpose(2, 1, 0)
  return value


def residual_block(params: Params, x: Any) -> Any:
  """Returns relu(x + branch(x)), [B,H,W,D]."""
  x = x.permute(0, 3, 1, 2)
  y = F.conv2d(x, params["conv_in"]["conv"]["kernel"], padding="same")
  y = F.relu(_batch_norm(params["conv_in"]["norm"], y))
  y = F.conv2d(y, params["conv_mid"]["conv"]["kernel"], padding="same")
  y = F.relu(x + _batch_norm(params["conv_mid"]["norm"], y))
  return y.permute(0, 2, 3, 1)


def transformer_block(params: Params, x: Any) -> Any:
  """Returns a pre-norm block with attention that is not causal, and GELU."""
  y = _layer_norm(params["attention_norm"], x)
  x = x + _attention(params["attention"], y)
  y = _layer_norm(params["feed_forward_norm"], x)
  gelu = F.gelu(_up(params["feed_forward"], y), approximate="tanh")
  return x + _down(params["feed_forward"], gelu)


def conformer_block(params: Params, x: Any) -> Any:
  """Returns a block of the Conformer."""

  def half(name: str, x: Any) -> Any:
    y = _layer_norm(params[f"{name}_norm"], x)
    return x + 0.5 * _down(params[name], F.silu(_up(params[name], y)))

  x = half("first", x)
  y = _layer_norm(params["attention_norm"], x)
  x = x + _attention(params["attention"], y)
  p, y = params["convolution"], _layer_norm(params["convolution_norm"], x)
  y = _up(p, y) * torch.sigmoid(y @ p["gate"] + p["gate_bias"])
  convolution = p["convolution"]
  y = F.conv1d(
    y.transpose(1, 2),
    convolution["kernel"],
    convolution["bias"],
    padding="same",
    groups=y.shape[-1],
  )
  y = F.silu(_batch_norm(p["norm"], y)).transpose(1, 2)
  return _layer_norm(params["final_norm"], half("last", x + _down(p, y)))


def _batch_norm(p: Params, x: Any) -> Any:
  return F.batch_norm(
    x, None, None, p["scale"], p["bias"], training=True, eps=_EPSILON
  )


def _layer_norm(p: Params, x: Any) -> Any:
  return F.layer_norm(x, x.shape[-1:], p["scale"], p["bias"], eps=_EPSILON)


def _attention(p: Params, x: Any) -> Any:
  heads = [
    torch.einsum("btd,dnh->bnth", x, p[name])
    for name in ("query", "key", "value")
  ]
  context = F.scaled_dot_product_attention(*heads)
  return torch.einsum("bnth,nhd->btd", context, p["out"])


def _up(p: Params, x: Any) -> Any:
  return x @ p["up"] + p["up_bias"]


def _down(p: Params, x: Any) -> Any:
  return x @ p["down"] + p["down_bias"]
