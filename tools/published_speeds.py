"""Speeds of training that others have published.

What the plan predicts is compared with them, and nothing is fitted to them.
"""

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
  """A published figure, and what is planned beside it.

  Attributes:
    name: Short, for tables and files.
    mfu: Share of the peak of model FLOPs, as published or as it follows from
      what was published.
    source: Who published it, and how.
    differs: What of their program ours is not.
    experiment: As `--exp` takes it.
    target: As `--target` takes it.
    assigned: Knobs by name.
    series: Whose measurements belong together.
  """

  name: str
  mfu: float
  source: str
  differs: str
  experiment: str
  target: str
  assigned: tuple[tuple[str, str], ...] = ()
  series: str


_CHART: Final = (
  "weak scaling on TPU v4, read off the chart in the README of Paxml"
)
_PAX: Final = (
  "theirs is a compiler of 2023 with flags that the chart does not name, ours"
  " the public one of today with its defaults; batches and what is recomputed"
  " are those of the experiments that Paxml shipped, which the chart may not"
  " have used"
)
_PARAMS: Final = "tasks.lm.params."
_KERNEL: Final = (
  "attention_kernel",
  "layers.attention.cudnn_attention.one_document",
)


def _pax(
  name: str,
  experiment: str,
  target: str,
  mfu: float,
  *assigned: tuple[str, str],
  differs: str = _PAX,
) -> Speed:
  return Speed(
    name=name,
    mfu=mfu,
    source=_CHART,
    differs=differs,
    experiment=_PARAMS + experiment,
    target=target,
    assigned=assigned,
    series="Pax on v4",
  )


ALL: Final = (
  _pax("16B", "c4.C4Spmd16BAdam32Replicas", "v4:2x4x4", 0.42),
  _pax("32B", "c4.C4Spmd32BAdam64Replicas", "v4:4x4x4", 0.42),
  _pax("128B", "lm_cloud.LmCloudSpmd128B", "v4:4x8x8", 0.49),
  _pax("256B", "lm_cloud.LmCloudSpmd256B", "v4:8x8x8", 0.53),
  _pax(
    "512B",
    "lm_cloud.LmCloudSpmd512B",
    "v4:8x8x16",
    0.49,
    ("global_batch_size", "2048"),
    differs="as the others, and half of the batch: that of 4,096 rows does not"
    " fit with this compiler",
  ),
  _pax("1024B", "lm_cloud.LmCloudSpmd1024B", "v4:8x16x16", 0.54),
  Speed(
    name="Llama-2-7B",
    mfu=0.50,
    source="JAX-Toolbox, 0.721 s for 16 rows of 4,096 tokens on 8 H100, as"
    " FLOPs without masked ones",
    differs="their layers are unrolled, attention is saved and not computed"
    " again, and kernels are autotuned",
    experiment=f"{_PARAMS}llama.Llama2_7B",
    target="h100:1x8",
    assigned=(_KERNEL,),
    series="GPUs",
  ),
  Speed(
    name="GPT-2-124M",
    mfu=0.395,
    source="modded-nanoGPT, 1,070.7 ms for 524,288 tokens on one H200",
    differs="theirs is PyTorch with fused kernels for the loss and the norms,"
    " autotuned, and another optimizer",
    experiment=f"{_PARAMS}gpt2.Gpt2Small124M",
    target="h200:1x1",
    assigned=(_KERNEL,),
    series="GPUs",
  ),
)
