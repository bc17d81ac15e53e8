"""Blocks in torch: baselines of the block cases.

As one would write them by hand, with torch's fused attention and its LSTM.
Parameters have the names of our layers; kernels of convolutions have torch's
layout.
"""

from typing import Any

import numpy as np
import torch  # pyrefly: ignore[missing-import]

from paxon.tools.benchmarks import pure_jax_blocks

F = torch.nn.functional
_EPSILON = pure_jax_blocks.EPSILON
Params = dict[str, Any]


def from_jax(path: Any, value: Any) -> np.ndarray:
  """Returns the parameter at a path of keys."""
  value = np.asarray(value)
  if _is_convolution(path):
    value = np.moveaxis(value, (-1, -2), (0, 1))
  return np.ascontiguousarray(value)


def _is_convolution(path: Any) -> bool:
  names = [key.key for key in path]
  return names[-1] == "kernel" and names[-2] in ("conv", "convolution")


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


def lstm(params: Params, x: Any) -> Any:
  """Returns the outputs of an LSTM."""
  size = params["bias"].shape[-1]

  def reorder(value: Any) -> Any:
    # Ours are update, input, forget, output; torch has input and forget first.
    return torch.cat([value[..., i, :] for i in (1, 2, 0, 3)], -1)

  bias = reorder(params["bias"])
  weights = [
    reorder(params["input"]).T,
    reorder(params["recurrent"]).T,
    bias,
    torch.zeros_like(bias),
  ]
  zeros = x.new_zeros(1, len(x), size)
  y, _, _ = torch.lstm(
    x, (zeros, zeros), weights, True, 1, 0.0, True, False, True
  )
  return y


def mamba2_block(params: Params, x: Any) -> Any:
  """Returns a pre-norm block of Mamba-2 whose heads share keys and queries."""
  p, y = params["mixer"], _rms_norm(params["norm"]["scale"], x)
  gate = torch.einsum("btd,dnp->btnp", y, p["gate"])
  value, key, query = (
    F.silu(_convolve(p[f"{name}_conv"], y, p[name]))
    for name in ("value", "key", "query")
  )
  step = F.softplus(y @ p["step"] + p["step_offset"])
  decay = -torch.exp(p["log_rate"]) * step
  mixed = _scan_chunks(value * step[..., None], decay, key[:, :, 0], query)
  mixed = (mixed + value * p["skip"][:, None]) * F.silu(gate)
  flat = _rms_norm(p["norm"]["scale"].flatten(), mixed.flatten(2))
  return x + flat @ p["out"].flatten(0, 1)


def _scan_chunks(value: Any, decay: Any, key: Any, query: Any) -> Any:
  """Returns the outputs of a state-space recurrence (SSD), [B,T,N,P]."""
  size = min(pure_jax_blocks.CHUNK_LENGTH, value.shape[1])
  value, decay, key, query = (
    x.unflatten(1, (-1, size)) for x in (value, decay, key, query[:, :, 0])
  )
  total = torch.cumsum(decay, 2)
  by_head = total.transpose(2, 3)
  gap = by_head[..., None] - by_head[..., None, :]
  causal = torch.ones(size, size, dtype=torch.bool).tril()
  weights = torch.exp(gap.masked_fill(~causal, -torch.inf))
  weights = weights * (query @ key.transpose(2, 3))[:, :, None]
  y = torch.einsum("bcnqk,bcknp->bcqnp", weights, value)
  left = value * torch.exp(total[:, :, -1:] - total)[..., None]
  added = torch.einsum("bcknp,bcks->bcnps", left, key)
  kept = torch.exp(total[:, :, -1])[..., None, None]
  states = [torch.zeros_like(added[:, 0])]
  for i in range(added.shape[1] - 1):
    states.append(states[-1] * kept[:, i] + added[:, i])
  carried = torch.einsum("bcqs,bcnps->bcqnp", query, torch.stack(states, 1))
  return (y + carried * torch.exp(total)[..., None]).flatten(1, 2)


def _convolve(p: Params, x: Any, kernel: Any) -> Any:
  y = torch.einsum("btd,dnp->bnpt", x, kernel)
  width, *channels = p["kernel"].shape
  y = F.conv1d(
    F.pad(y.flatten(1, 2), (width - 1, 0)),
    p["kernel"].flatten(1).T[:, None],
    p["bias"].flatten(),
    groups=y.shape[1] * y.shape[2],
  )
  return y.unflatten(1, channels).permute(0, 3, 1, 2)


def vector_quantizer(params: Params, x: Any) -> Any:
  """Returns the nearest codes of normalized vectors, plus the loss."""
  codebook, z = _normalize(params["codebook"][0]), _normalize(x)
  nearest = (z.detach() @ codebook.detach().T).argmax(-1)
  values = codebook[nearest]
  distance = (z.detach() - values).square().sum(-1)
  commitment = (z - values.detach()).square().sum(-1)
  loss = (distance + 0.25 * commitment).mean()
  return z + (values - z).detach() + loss


def _normalize(x: Any) -> Any:
  return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-12)


def _rms_norm(scale: Any, x: Any) -> Any:
  return F.rms_norm(x, x.shape[-1:], scale, eps=_EPSILON)


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
