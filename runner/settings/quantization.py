"""The knobs of quantization, and the rules that follow from them."""

from typing import Final, Literal

from paxon.quantization import matmuls, recipes
from paxon.quantization import rules as rules_lib
from paxon.runner import knobs as knobs_lib

# Layers that the knobs quantize; the experts are the last.
COVERED: Final = (
  matmuls.ATTENTION_PROJECTIONS,
  matmuls.FEED_FORWARD,
  matmuls.EXPERTS,
)


class QuantizationKnobs(knobs_lib.Group):
  """Number formats of matrix products and KV caches.

  Attributes:
    quantization: Recipe of attention projections and feed-forward layers, such
      as `fp8` or `int8`, see `quantization.recipes`; None computes in `dtype`.
      `int8:convert` quantizes the weights of a trained run for `int8:serve`.
      Override `quantization_rules` to cover other layers.
    quantization_monitor: Whether training reports the shares of values that
      quantization clips or flushes to zero, at the cost of one pass over each
      operand. It cannot change when a run resumes.
    kv_cache: Storage format of KV caches that leave it unset, see
      `layers.attention.quantized_rows`; None stores keys and values unchanged.
      Training does not depend on it, so it can be set for `--mode=decode` only.
  """

  quantization: str | None = None
  quantization_monitor: bool = False
  kv_cache: Literal["int8", "fp8", "int4"] | None = None


def parse(knobs: QuantizationKnobs) -> recipes.Choice | None:
  """Returns the recipe and its use; None without quantization.

  Raises:
    knobs.KnobError: There is no such recipe or use.
  """
  text = knobs.quantization
  if text is None:
    return None
  try:
    return recipes.parse(text)
  except ValueError as error:
    problem = f".quantization = {text!r}: {error}"
    raise knobs_lib.make_error(knobs, problem) from None


def serves(knobs: QuantizationKnobs) -> bool:
  """Whether the job converts or serves quantized weights; raises KnobError."""
  choice = parse(knobs)
  return choice is not None and choice.mode is not recipes.Mode.TRAIN


def make_rules(knobs: QuantizationKnobs) -> rules_lib.Rules:
  """Returns the rules of the layers `COVERED`; raises KnobError."""
  choice = parse(knobs)
  return () if choice is None else (rules_lib.Rule(COVERED, choice.recipe),)
