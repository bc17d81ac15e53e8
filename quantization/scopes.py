"""Scopes around quantized products, by which a plan finds them.

Each product of a quantized einsum is computed inside of one, whatever it is
computed in, so that one that does not run in few bits is seen. Names stand in
the compiled program. Plain text: who reads programs needs no JAX.
"""

from typing import Final

FORWARD: Final = "quantized_forward"
INPUT_GRADIENT: Final = "quantized_input_gradient"
WEIGHT_GRADIENT: Final = "quantized_weight_gradient"

# By what they are called in words.
SCOPES: Final = {
  FORWARD: "forward",
  INPUT_GRADIENT: "input gradient",
  WEIGHT_GRADIENT: "weight gradient",
}
