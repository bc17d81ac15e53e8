"""Root-mean-square norm of each head, for queries and keys.

Normalized queries and keys bound the logits of attention (Dehghani et al. 2023,
https://arxiv.org/abs/2302.05442, section 2.2). One scale serves all heads, as
in Qwen 3 and Gemma 3.
"""

from paxon.layers import rms_norm
from paxon.sharding import axes


class HeadNorm(rms_norm.RmsNorm):
  """`RmsNorm` over the last axis of [B,T,N,H].

  Attributes:
    axis: Logical axis of the features, the head's own.
  """

  axis: str = axes.HEAD_DIM
