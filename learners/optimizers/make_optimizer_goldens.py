"""Writes goldens of optimizers from other implementations.

  PYTHON learners/optimizers/make_optimizer_goldens.py

`PYTHON` needs numpy, torch, and pytorch_optimizer or bitsandbytes (CPU): cases
of a package that is not installed keep their values. Each case has the
parameters after 12 steps of the same random gradients, of two layers that are
trained separately, in float64 unless the package rejects it.
"""

from collections.abc import Callable, Iterator
import importlib
import importlib.metadata
import importlib.util
import json
import pathlib
import pkgutil
from typing import Any

import numpy as np

_PATH = pathlib.Path(__file__).parent / "goldens" / "optimizers.json"
_SHAPE = (2, 8, 8)
# Two blocks of 256 a layer.
_BLOCKS_SHAPE = (2, 16, 32)


def main() -> None:
  """Writes the goldens whose packages are installed."""
  torch = importlib.import_module("torch")
  goldens = json.loads(_PATH.read_text()) if _PATH.exists() else {}
  for name, package, shape, dtype, make in _cases(torch):
    layers = []
    for i in range(shape[0]):
      kind = getattr(torch, dtype)

      def draw(
        seed: int, i: int = i, shape: Any = shape, kind: Any = kind
      ) -> Any:
        values = np.random.default_rng(seed).normal(size=shape)[i]
        return torch.tensor(values).to(kind)

      param = torch.nn.Parameter(draw(0))
      optimizer = make([param])
      for t in range(1, 13):
        param.grad = draw(t)
        optimizer.step()
      layers.append(param.detach().numpy())
    version = importlib.metadata.version(package)
    goldens[name] = {
      "package": f"{package} {version.partition('+')[0]}",
      "params": np.round(np.stack(layers).astype(np.float64), 6).tolist(),
    }
  text = json.dumps(goldens, sort_keys=True)
  _PATH.parent.mkdir(exist_ok=True)
  _PATH.write_text(text.replace("}, ", "},\n") + "\n")


def _cases(
  torch: Any,
) -> Iterator[tuple[str, str, tuple[int, ...], str, Callable[[Any], Any]]]:
  """Yields (name, package, shape, dtype, function that makes the optimizer)."""
  adam = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-6}
  yield (
    "AdamW",
    "torch",
    _SHAPE,
    "float64",
    lambda p: torch.optim.AdamW(p, **adam, weight_decay=0.1),
  )
  yield (
    "SGD",
    "torch",
    _SHAPE,
    "float64",
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
  )
  if importlib.util.find_spec("bitsandbytes"):
    # In no lock of ours, nor is pytorch_optimizer.
    bits = pkgutil.resolve_name("bitsandbytes")
    _round_exactly(torch)
    yield (
      "8-bit Adam",
      "bitsandbytes",
      _BLOCKS_SHAPE,
      "float32",
      lambda p: bits.optim.AdamW8bit(
        p, **adam, weight_decay=0.1, min_8bit_size=1
      ),
    )
  if not importlib.util.find_spec("pytorch_optimizer"):
    return
  more = pkgutil.resolve_name("pytorch_optimizer")
  for name, make in (
    (
      "Lion",
      lambda p: more.Lion(
        p, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, weight_decouple=True
      ),
    ),
    (
      "Lion, cautious",
      lambda p: more.Lion(
        p,
        lr=0.1,
        betas=(0.9, 0.99),
        weight_decay=0.1,
        weight_decouple=True,
        cautious=True,
      ),
    ),
    (
      "SOAP",
      lambda p: more.SOAP(
        p,
        **adam,
        shampoo_beta=0.9,
        weight_decay=0.0,
        precondition_frequency=3,
      ),
    ),
    (
      "Shampoo",
      lambda p: more.ScalableShampoo(
        p,
        lr=0.1,
        betas=(0.9, 0.95),
        # Counted from 1.
        start_preconditioning_step=4,
        preconditioning_compute_steps=1,
        block_size=4,
        # AdaGrad.
        graft_type=2,
        diagonal_eps=1e-16,
        matrix_eps=1e-8,
        use_svd=True,
        shape_interpretation=False,
      ),
    ),
    ("Prodigy", lambda p: more.Prodigy(p, lr=1.0, weight_decay=0.0)),
    (
      "AdEMAMix",
      lambda p: more.AdEMAMix(
        p, lr=0.1, betas=(0.9, 0.999, 0.9999), weight_decay=0.0
      ),
    ),
    (
      "Schedule-free AdamW",
      lambda p: _train_mode(
        more.ScheduleFreeAdamW(p, lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
      ),
    ),
  ):
    yield name, "pytorch_optimizer", _SHAPE, "float64", make


def _round_exactly(torch: Any) -> None:
  """Replaces the rounding of bitsandbytes on CPUs by its definition.

  That of version 0.50.2 does not choose the nearest unsigned value for 3 % of
  elements, unlike its other backends.
  """
  cpu: Any = pkgutil.resolve_name("bitsandbytes.backends.cpu.ops")

  def quantize(x: Any, code: Any, scale: Any, index: Any, size: int) -> None:
    blocks = x.reshape(-1, size)
    scale.copy_(blocks.abs().amax(1))
    distance = ((blocks / scale[:, None])[..., None] - code).abs()
    index.copy_(distance.argmin(-1).to(torch.uint8).reshape(x.shape))

  cpu._quant_blockwise_fp32_direct = quantize


def _train_mode(optimizer: Any) -> Any:
  optimizer.train()
  return optimizer


if __name__ == "__main__":
  main()
