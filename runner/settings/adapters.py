"""The knobs of fine-tuning, and the adapters that follow from them."""

from typing import Any, Literal

from paxon.runner import knobs as knobs_lib
from paxon.runner.settings import quantization


class AdapterKnobs(knobs_lib.Group):
  """Variables to train, and low-rank adapters of frozen layers.

  Attributes:
    trainable: Regular expressions of the whole names of the variables to train,
      such as `.*/attention/.*`; the others have no gradient and no optimizer
      state. None trains all.
    frozen: Patterns of variables to freeze, also among those of `trainable`.
    lora_rank: Rank of adapters of attention projections and dense feed-forward
      layers, which alone are trained unless `trainable` is set, or None.
    lora_experts: Whether each expert of a mixture has adapters, too.
    lora_alpha: Factor of the adapters times the rank; None is `lora_rank`.
    lora_kind: Form of the adapters, see `quantization.lora`.
    lora_matmuls: Matmuls with an adapter, such as `query`; None is all.
    frozen_storage: Storage of frozen variables: `dtype` (the knob); or that
      of kernels of experts and adapted layers (`quantization.stored_kernels`).
  """

  trainable: tuple[str, ...] | None = None
  frozen: tuple[str, ...] = ()
  lora_rank: int | None = None
  lora_alpha: float | None = None
  lora_kind: Literal["lora", "rslora", "dora"] = "lora"
  lora_matmuls: tuple[str, ...] | None = None
  lora_experts: bool = False
  frozen_storage: Literal["dtype", "nf4", "int8", "int4", "fp8"] | None = None


def make_rules(knobs: AdapterKnobs) -> tuple[Any, ...]:
  """Returns the `lora.LoraRule` of layers; none without `lora_rank`.

  Raises:
    knobs.KnobError: The knobs are not valid.
  """
  from paxon.quantization import lora  # Few users of this module need it.

  if (rank := knobs.lora_rank) is None:
    return ()
  covered = quantization.COVERED
  try:
    adapter = lora.Lora(
      rank=rank, alpha=knobs.lora_alpha, kind=lora.Kind(knobs.lora_kind)
    )
    return tuple(
      lora.LoraRule(each, adapter, knobs.lora_matmuls)
      for each in [covered[:2], covered[2:]][: 1 + knobs.lora_experts]
    )
  except ValueError as error:
    raise knobs_lib.make_error(knobs, f": {error}") from None
