"""Bits per byte: a loss that does not depend on the tokenizer.

It is the negative log likelihood of all tokens in bits, divided by the number
of bytes of source text that they stand for. Tokens that stand for no byte, such
as the end of a document, cost bits as well.
"""

import math

import jax.numpy as jnp

from paxon.learners import metric_functions, weighted


def bits_per_byte(
  batch: metric_functions.Batch, outputs: metric_functions.Outputs
) -> dict[str, weighted.Weighted]:
  """Returns the bits and the bytes of one batch.

  Args:
    batch: With `weights` float32 [B, T] and `target_bytes` int32 [B, T], how
      many bytes each target stands for.
    outputs: With `token_nll` float32 [B, T], in nats.

  Returns:
    The weighted pair `bits_per_byte`.
  """
  weights = batch["weights"].astype(jnp.float32)
  nats = jnp.sum(outputs["token_nll"].astype(jnp.float32) * weights)
  source = jnp.sum(batch["target_bytes"].astype(jnp.float32) * weights)
  return {"bits_per_byte": (nats / math.log(2), source)}
