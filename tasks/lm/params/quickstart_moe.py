"""The quickstart with a mixture of experts, for the same machines."""

from typing import Any

import fiddle as fdl

from paxon.layers.moe import balance, experts, mixture, routers
from paxon.tasks.lm.params import quickstart


class PythonStdlibMoe(quickstart.PythonStdlibLm):
  r"""The quickstart with eight experts, two for each token.

  bazel run //runner:main -- \
    --exp=tasks.lm.params.quickstart_moe.PythonStdlibMoe

  A token passes through as many parameters as in `PythonStdlibLm`, of 2.6 M;
  no token is dropped.
  """

  mlp_dim = 192

  num_experts: int = 8
  num_choices: int = 2
  load_balance_weight: float = 0.01

  def feed_forward(self) -> fdl.Config[Any]:
    """Returns the mixture of experts of a layer."""
    return fdl.Config(
      mixture.MixtureOfExperts,
      num_experts=self.num_experts,
      router=fdl.Config(routers.TopK, k=self.num_choices),
      experts=fdl.Config(experts.GatedExperts, mlp_dim=self.mlp_dim),
      losses=(balance.switch(self.load_balance_weight),),
      summarize_loads=True,
    )
