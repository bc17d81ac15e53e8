"""Tests for the quickstart with a mixture of experts."""

import fiddle as fdl
import jax
import numpy as np

from paxon.tasks.lm.params import quickstart, quickstart_moe


def _shapes(experiment):
  model = fdl.build(experiment.job().task.model)
  tokens = np.zeros((1, 4), np.int32)
  made = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens, tokens)
  return jax.tree_util.tree_leaves_with_path(made["params"])


def test_a_token_passes_through_the_parameters_of_the_dense_quickstart():
  """Except the router's."""
  mixture = quickstart_moe.PythonStdlibMoe()
  active = 0
  for path, value in _shapes(mixture):
    name = jax.tree_util.keystr(path)
    if "router" not in name:
      share = mixture.num_choices / mixture.num_experts
      active += value.size * (share if "experts" in name else 1)
  dense = sum(value.size for _, value in _shapes(quickstart.PythonStdlibLm()))
  assert active == dense
