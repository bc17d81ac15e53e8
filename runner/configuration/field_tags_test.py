"""Tests of tags: all fields are found, set, and built."""

import fiddle as fdl
from fiddle import selectors
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.attention import weight_dropout
from paxon.runner.configuration import dump, field_tags
from paxon.runner.session import model_loss
from paxon.runner.training import testing
from paxon.sharding import variables


def _config():
  return testing.TinyLm().job()


def test_sets_all_initializers_and_dtypes_at_once():
  config = _config()
  before = dump.to_text(config)
  added = field_tags.add(config)
  assert "task.model.embedding.param_dtype" in added
  assert any(path.endswith("projections.output_init") for path in added)
  # Only default objects are added.
  kept = [x for x in before.splitlines() if ".projections = " not in x]
  assert set(kept) <= set(dump.to_text(config).splitlines())
  for tag, value in (
    (field_tags.WeightInit, nn.initializers.constant(0.25)),
    (field_tags.ParamDtype, jnp.bfloat16),
  ):
    assert tag in added.values()
    selectors.select(config, tag=tag).replace(value)
  job = fdl.build(config)
  batch = {
    name: jnp.asarray(x)
    for name, x in job.train_input.get_next().items()
    if x.dtype != object
  }
  values = variables.unbox(model_loss.init(job.task.model, batch))
  for path, x in jax.tree_util.tree_leaves_with_path(values["params"]):
    assert x.dtype == jnp.bfloat16, path
    name = jax.tree_util.keystr(path)
    if "norm" not in name:
      np.testing.assert_array_equal(x.astype(jnp.float32), 0.25, name)


def test_dropout_rates_are_found_in_classes_of_dropout():
  config = fdl.Config(
    nn.Sequential,
    [
      fdl.Config(nn.Dropout, rate=0.5),
      fdl.Config(weight_dropout.DropoutEinsum, rate=0.0),
      fdl.Config(nn.Dense, 3),
    ],
  )
  added = field_tags.add(config)
  rates = [p for p, tag in added.items() if tag is field_tags.DropoutRate]
  assert rates == ["layers[0].rate", "layers[1].rate"]
  selectors.select(config, tag=field_tags.DropoutRate).replace(0.1)
  assert [layer.rate for layer in config.layers[:2]] == [0.1, 0.1]
  assert fdl.build(config).layers[0].rate == 0.1


def test_functions_get_no_tags():
  config = fdl.Config(
    nn.Dense,
    3,
    kernel_init=fdl.Config(nn.initializers.normal, dtype=jnp.float32),
  )
  added = field_tags.add(config)
  assert list(added) == ["dtype", "param_dtype", "kernel_init"]


def test_wrong_values_are_found_by_the_class_that_gets_them():
  config = fdl.Config(weight_dropout.DropoutEinsum, rate=0.0)
  field_tags.add(config)
  selectors.select(config, tag=field_tags.DropoutRate).replace(1.5)
  with pytest.raises(ValueError, match="rate"):
    fdl.build(config)
