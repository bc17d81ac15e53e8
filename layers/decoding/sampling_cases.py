"""Cases of samplers, shared by the goldens and their test."""

from typing import Any

import numpy as np

VOCAB = 24
ROWS = 3
PROMPT = 5

CASES: tuple[dict[str, Any], ...] = (
  {"temperature": 0.7},
  {"temperature": 1.6},
  {"top_k": 5},
  {"top_p": 0.8},
  {"min_p": 0.1},
  {"typical_p": 0.6},
  {"epsilon": 0.03},
  {"repetition_penalty": 1.7},
  {"repetition_penalty": 0.8, "temperature": 0.9, "top_k": 12, "top_p": 0.9},
  {"top_k": 9, "typical_p": 0.7},
  {"top_p": 0.95, "min_p": 0.05, "epsilon": 0.02},
  {
    "repetition_penalty": 1.2,
    "temperature": 1.3,
    "top_k": 20,
    "top_p": 0.97,
    "min_p": 0.02,
    "typical_p": 0.95,
    "epsilon": 0.01,
  },
)


def logits() -> np.ndarray:
  """Returns float32 [ROWS, VOCAB], from flat to peaked."""
  x = np.random.default_rng(7).standard_normal((ROWS, VOCAB))
  return (x * np.asarray([[0.5], [1.5], [3.0]])).astype(np.float32)


def prompts() -> np.ndarray:
  """Returns int32 [ROWS, PROMPT]; some ids occur twice."""
  rng = np.random.default_rng(8)
  return rng.integers(0, VOCAB, (ROWS, PROMPT)).astype(np.int32)
