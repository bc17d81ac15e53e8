"""Published training speeds to compare plans with.

Nothing is fitted to them.
"""

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
  """A published speed and the experiment to plan.

  Attributes:
    name: Short name, for tables and files.
    mfu: Model FLOPs as a share of peak FLOPs, published or derived from
      published values.
    source: Publication.
    differs: Differences between the published program and ours.
    experiment: Value of `--exp`.
    target: Value of `--target`.
    assigned: Knob values by name.
    series: Group of comparable measurements.
  """

  name: str
  mfu: float
  source: str
  differs: str
  experiment: str
  target: str
  assigned: tuple[tuple[str, str], ...] = ()
  series: str


_CHART: Final = "weak scaling on TPU v4, read off the chart in Paxml's README"
_PAX: Final = (
  "the chart used a compiler of 2023 with unknown flags, we use today's public"
  " compiler with default flags; batch sizes and remat policies are those of"
  " the experiments in Paxml, which the chart may not have used"
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
    differs="as above; also half the batch, since 4,096 sequences do not fit"
    " with this compiler",
  ),
  _pax("1024B", "lm_cloud.LmCloudSpmd1024B", "v4:8x16x16", 0.54),
  Speed(
    name="Llama-2-7B",
    mfu=0.50,
    source="JAX-Toolbox, 0.721 s for 16 sequences of 4,096 tokens on 8 H100,"
    " as FLOPs without masked attention",
    differs="their layers are unrolled, attention is saved instead of"
    " recomputed, and kernels are autotuned",
    experiment=f"{_PARAMS}llama.Llama2_7B",
    target="h100:1x8",
    assigned=(_KERNEL,),
    series="GPUs",
  ),
  Speed(
    name="GPT-2-124M",
    mfu=0.395,
    source="modded-nanoGPT, 1,070.7 ms for 524,288 tokens on one H200",
    differs="their program uses PyTorch with fused, autotuned kernels for the"
    " loss and the norms, and another optimizer",
    experiment=f"{_PARAMS}gpt2.Gpt2Small124M",
    target="h200:1x1",
    assigned=(_KERNEL,),
    series="GPUs",
  ),
)
