"""Regenerates `goldens/torch_cells.npz` with PyTorch.

python -m paxon.layers.recurrent.make_goldens
"""

import pathlib

import numpy as np
import torch  # pyrefly: ignore[missing-import]

from paxon.layers.recurrent import testing


def main() -> None:
  """Writes the outputs of each case."""
  outputs = {}
  for name, (kind, projection) in testing.TORCH_CASES.items():
    cls = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind]
    more = {"proj_size": projection} if projection else {}
    layer = cls(testing.EMBED, testing.HIDDEN, batch_first=True, **more)
    layer = layer.double()
    with torch.no_grad():
      for parameter, value in layer.named_parameters():
        drawn = testing.torch_weight(parameter, tuple(value.shape))
        value.copy_(torch.from_numpy(drawn))
      x = torch.from_numpy(testing.torch_input())
      outputs[name] = layer(x)[0].numpy()
  path = pathlib.Path(__file__).parent / "goldens" / "torch_cells.npz"
  np.savez_compressed(path, **outputs)


if __name__ == "__main__":
  main()
