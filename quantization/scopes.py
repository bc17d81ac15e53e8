"""Named scopes of quantized matmuls, for programs that read compiled text."""

from typing import Final

FORWARD: Final = "quantized_forward"
INPUT_GRADIENT: Final = "quantized_input_gradient"
WEIGHT_GRADIENT: Final = "quantized_weight_gradient"

DESCRIPTIONS: Final = {
  FORWARD: "forward",
  INPUT_GRADIENT: "input gradient",
  WEIGHT_GRADIENT: "weight gradient",
}
