r"""Writes `testdata/preference_losses.json` with TRL 1.16.0.

  python layers/make_preference_goldens.py layers/testdata

Values of ORPO and SimPO, and their gradients. (TRL computes the other losses
within a training step; a trajectory in `layers/models` covers DPO and IPO.)
"""

import json
import pathlib
import pkgutil
import sys
import types
from typing import Any

_CHOSEN = [-0.3, -1.1, -2.0, -0.01]
_REJECTED = [-0.6, -0.2, -7.0, -3.0]


def main(folder: pathlib.Path) -> None:
  """Writes the goldens to a folder."""
  import torch  # pyrefly: ignore[missing-import]

  # In no lock of ours; see the module.
  orpo_trainer: Any = pkgutil.resolve_name("trl.experimental.orpo:ORPOTrainer")
  cpo_trainer: Any = pkgutil.resolve_name("trl.experimental.cpo:CPOTrainer")

  def orpo(chosen: Any, rejected: Any, beta: float) -> Any:
    trainer = types.SimpleNamespace(
      beta=beta, accelerator=types.SimpleNamespace(device="cpu")
    )
    found = orpo_trainer.odds_ratio_loss(trainer, chosen, rejected)
    return -chosen - found[0]

  def simpo(chosen: Any, rejected: Any, beta: float, margin: float) -> Any:
    trainer = types.SimpleNamespace(
      beta=beta,
      simpo_gamma=margin,
      loss_type="simpo",
      label_smoothing=0.0,
      alpha=0.0,
      accelerator=types.SimpleNamespace(device="cpu"),
    )
    found = cpo_trainer.cpo_loss(trainer, chosen, rejected)
    return found[0]

  cases = []
  for name, fn, options in (
    ("orpo", orpo, {"beta": 0.25}),
    ("simpo", simpo, {"beta": 2.0, "margin": 1.0}),
  ):
    chosen, rejected = (
      torch.tensor(x, requires_grad=True) for x in (_CHOSEN, _REJECTED)
    )
    losses = fn(chosen, rejected, **options)
    losses.sum().backward()
    cases.append(
      {
        "loss": name,
        "options": options,
        "chosen": _CHOSEN,
        "rejected": _REJECTED,
        "values": losses.tolist(),
        "gradients": [chosen.grad.tolist(), rejected.grad.tolist()],
      }
    )
  text = json.dumps(cases) + "\n"
  (folder / "preference_losses.json").write_text(text)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
