"""References of mixture layers in float64 numpy, from the definitions."""

import numpy as np


def softmax(x):
  """Returns the softmax over the last axis."""
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def silu(x):
  """Returns `x * sigmoid(x)`."""
  return x / (1 + np.exp(-x))


def mix(x, ids, weights, parameters, hidden):
  """Returns the weighted sum over the experts of each token, in float64.

  Args:
    x: Tokens [T,D].
    ids: Experts [T,k]; others than 0 to E - 1 are none.
    weights: Factors [T,k].
    parameters: Arrays by name, as in `experts.Stacks`.
    hidden: `(gate or None, up) -> hidden`.
  """
  p = {k: np.asarray(v, np.float64) for k, v in parameters.items()}
  none = np.zeros((len(p["up"]), 1))
  out = np.zeros(x.shape)
  for t, row in enumerate(np.asarray(x, np.float64)):
    for e, w in zip(ids[t], weights[t], strict=True):
      if 0 <= e < len(p["up"]):
        up, gate = (
          row @ p[name][e]
          + p.get(f"{name}_bias", np.zeros((len(p["up"]), 1)))[e]
          if name in p
          else None
          for name in ("up", "gate")
        )
        y = hidden(gate, up) @ p["down"][e]
        out[t] += w * (y + p.get("down_bias", none)[e])
  return out
