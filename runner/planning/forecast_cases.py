"""Small models in many layouts, to compare analytical estimates with compilers.

`python -m paxon.runner.planning.forecast_cases FILE NAME ...` plans cases
for their targets, all in one process, and writes the plans as `plan.json`.
"""

from collections.abc import Mapping
import pathlib
import sys
from typing import Any, Final

import fiddle as fdl
import jax.numpy as jnp

from paxon.inputs import base_input, synthetic_lm_input
from paxon.layers import (
  block,
  embedding,
  feed_forward,
  remat,
  rms_norm,
  rotary_embedding,
  softmax_loss,
  stack,
)
from paxon.layers.attention import grouped_query
from paxon.layers.models import decoder_lm
from paxon.learners import adamw, learner, schedules
from paxon.runner import experiment
from paxon.runner import task as task_lib
from paxon.runner.plan import result
from paxon.runner.plan import target as targets
from paxon.runner.planning import measure

ONLY: Final = (remat.ATTENTION_CONTEXT, remat.FEED_FORWARD_HIDDEN)

_POLICIES: Final[Mapping[str, remat.Policy | None]] = {
  "none": None,
  "nothing": remat.save_nothing,
  "projections": remat.save_projections,
  "only": remat.save_only(*ONLY),
}


class ForecastLm(experiment.Experiment):
  """A decoder whose activations are larger than its state."""

  num_train_steps = 10
  global_batch_size = 16

  length: int = 1024
  num_layers: int = 6
  embed_dim: int = 512
  mlp_dim: int = 2048
  num_heads: int = 8
  num_kv_heads: int = 8
  head_dim: int = 64
  vocab_size: int = 8192
  scan: bool = True
  remat: str = "none"
  compute_dtype: str = "float32"
  num_microbatches: int = 1
  chunk_length: int | None = 512

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model, trained by AdamW with float32 parameters."""
    dtype = jnp.dtype(self.compute_dtype)
    norm = fdl.Config(rms_norm.RmsNorm, dtype=dtype)
    layer = fdl.Config(
      block.TransformerBlock,
      attention_norm=norm,
      attention=fdl.Config(
        grouped_query.GroupedQueryAttention,
        num_heads=self.num_heads,
        num_kv_heads=self.num_kv_heads,
        head_dim=self.head_dim,
        rotary=fdl.Config(rotary_embedding.Rotary),
        dtype=dtype,
      ),
      feed_forward_norm=fdl.Config(rms_norm.RmsNorm, dtype=dtype),
      feed_forward=fdl.Config(
        feed_forward.GatedFeedForward, mlp_dim=self.mlp_dim, dtype=dtype
      ),
    )
    model = fdl.Config(
      decoder_lm.DecoderLm,
      embedding=fdl.Config(
        embedding.Embedding,
        vocab_size=self.vocab_size,
        embed_dim=self.embed_dim,
        dtype=dtype,
      ),
      stack=fdl.Config(
        stack.Stack,
        blocks=[layer],
        num_layers=self.num_layers,
        scan=self.scan,
        remat_policy=_POLICIES[self.remat],
      ),
      final_norm=fdl.Config(rms_norm.RmsNorm, dtype=dtype),
      token_loss=fdl.Config(
        softmax_loss.SoftmaxLoss, chunk_length=self.chunk_length
      ),
    )
    schedule = fdl.Config(
      schedules.WarmupCosine, peak=1e-3, warmup_steps=2, total_steps=10
    )
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=model,
      learner=fdl.Config(
        learner.Learner,
        optimizer=fdl.Config(adamw.AdamW, schedule=schedule, weight_decay=0.1),
        max_grad_norm=1.0,
        num_microbatches=self.num_microbatches,
      ),
    )

  def datasets(self) -> dict[str, fdl.Config[base_input.BaseInput]]:
    """Returns an endless split of made-up tokens."""
    return {
      "train": fdl.Config(
        synthetic_lm_input.SyntheticLmInput,
        vocab_size=self.vocab_size,
        global_batch_size=self.global_batch_size,
        length=self.length,
      )
    }


_BF16: Final = {"compute_dtype": "bfloat16"}
_WIDE: Final = {
  "num_layers": 8,
  "embed_dim": 1024,
  "mlp_dim": 4096,
  "num_heads": 16,
  "num_kv_heads": 8,
  "vocab_size": 32768,
}
_GROUPED: Final = {
  "length": 2048,
  "embed_dim": 1024,
  "mlp_dim": 2816,
  "num_heads": 16,
  "num_kv_heads": 4,
  "vocab_size": 32768,
}

# Target and knobs by name.
CASES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
  "none": ("h200:1x1", {"remat": "none"}),
  "nothing": ("h200:1x1", {"remat": "nothing"}),
  "twice": ("h200:1x1", {"remat": "nothing", "global_batch_size": 32}),
  "projections": ("h200:1x1", {"remat": "projections"}),
  "only_bf16": ("h200:1x1", {"remat": "only", **_BF16}),
  "grouped": (
    "h200:1x1",
    {"remat": "only", "global_batch_size": 8, **_GROUPED},
  ),
  "microbatches": (
    "h200:1x1",
    {"remat": "nothing", "global_batch_size": 32, "num_microbatches": 2},
  ),
  "fsdp_none": (
    "h200:1x4",
    {"mesh": "fsdp=4", "global_batch_size": 64, "remat": "none"},
  ),
  "fsdp_nothing_bf16": (
    "h200:1x4",
    {"mesh": "fsdp=4", "global_batch_size": 64, "remat": "nothing", **_BF16},
  ),
  "fsdp_tensor_wide_bf16": (
    "h200:1x8",
    {
      "mesh": "fsdp=4,tensor=2",
      "global_batch_size": 64,
      "remat": "nothing",
      **_BF16,
      **_WIDE,
    },
  ),
  "fsdp_tensor_none_bf16": (
    "h200:1x4",
    {
      "mesh": "fsdp=2,tensor=2",
      "global_batch_size": 32,
      "remat": "none",
      **_BF16,
    },
  ),
  "fsdp_tensor_projections": (
    "h200:1x4",
    {
      "mesh": "fsdp=2,tensor=2",
      "global_batch_size": 32,
      "remat": "projections",
    },
  ),
  "data_fsdp_microbatches": (
    "h200:1x8",
    {
      "mesh": "data=2,fsdp=4",
      # As many rows at a time as in other cases, so the same kernels.
      "global_batch_size": 256,
      "remat": "projections",
      "num_microbatches": 2,
      **_BF16,
    },
  ),
}


def plan(name: str) -> result.Plan:
  """Compiles a case; the variables of its target must be set."""
  target, knobs = CASES[name]
  job = fdl.build(ForecastLm(**knobs).job())
  return measure.measure(job, targets.parse(target), experiment=name)


def main(arguments: list[str]) -> int:
  """Plans the cases that are named, or all, and writes the plans."""
  file, *names = arguments
  plans = tuple(plan(name) for name in names or CASES)
  pathlib.Path(file).write_text(result.to_json(plans))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
