"""Names of logical axes and of mesh axes.

Layers name the axes of their parameters and activations with logical axes;
rules (`paxon.sharding.rules`) map these to mesh axes. Parameters and
activations of the same width have different names because they are usually
sharded differently: `embed` of a kernel is split over `fsdp`,
`activation_embed` is not.
"""

from typing import Final

# Activations and parameters.
BATCH: Final = "batch"
LENGTH: Final = "length"
KV_LENGTH: Final = "kv_length"
EMBED: Final = "embed"
MLP: Final = "mlp"
HEADS: Final = "heads"
KV_HEADS: Final = "kv_heads"
HEAD_DIM: Final = "head_dim"
VOCAB: Final = "vocab"
EXPERTS: Final = "experts"
RANK: Final = "rank"

# Leading axes that stacks and pipelines add to parameters.
LAYERS: Final = "layers"
STAGES: Final = "stages"

# Activations only. The residual stream has `activation_length`, other
# activations have `length`.
ACTIVATION_LENGTH: Final = "activation_length"
ACTIVATION_EMBED: Final = "activation_embed"
ACTIVATION_MLP: Final = "activation_mlp"
ACTIVATION_HEADS: Final = "activation_heads"
ACTIVATION_KV_HEADS: Final = "activation_kv_heads"
ACTIVATION_HEAD_DIM: Final = "activation_head_dim"
ACTIVATION_VOCAB: Final = "activation_vocab"
ACTIVATION_EXPERTS: Final = "activation_experts"

LOGICAL_AXES: Final[tuple[str, ...]] = (
  BATCH,
  LENGTH,
  KV_LENGTH,
  EMBED,
  MLP,
  HEADS,
  KV_HEADS,
  HEAD_DIM,
  VOCAB,
  EXPERTS,
  RANK,
  LAYERS,
  STAGES,
  ACTIVATION_LENGTH,
  ACTIVATION_EMBED,
  ACTIVATION_MLP,
  ACTIVATION_HEADS,
  ACTIVATION_KV_HEADS,
  ACTIVATION_HEAD_DIM,
  ACTIVATION_VOCAB,
  ACTIVATION_EXPERTS,
)

# Mesh axes, slowest network first; the last axis communicates the most.
STAGE: Final = "stage"
DATA: Final = "data"
FSDP: Final = "fsdp"
EXPERT: Final = "expert"
SEQUENCE: Final = "sequence"
TENSOR: Final = "tensor"

MESH_AXES: Final[tuple[str, ...]] = (
  STAGE,
  DATA,
  FSDP,
  EXPERT,
  SEQUENCE,
  TENSOR,
)
