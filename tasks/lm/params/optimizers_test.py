"""Tests for the quickstart under other optimizers."""

import json

import fiddle as fdl
import jax
import pytest

from paxon.learners.optimizers import optimizers_page
from paxon.runner.session import session
from paxon.tasks.lm.params import lm_cloud, optimizers


def _toy(name, **knobs):
  experiment = optimizers.PythonStdlibOptimizer(optimizer_name=name, **knobs)
  return fdl.build(experiment.shrink().job())


def test_names_are_those_of_the_page():
  assert set(optimizers.CHOICES) == set(optimizers_page.ROWS)


def test_rates_are_those_of_the_study():
  found = json.loads(optimizers_page.STUDY.read_text())["optimizers"]
  rates = {name: row["rate"] for name, row in found.items()}
  assert rates == {name: c.rate for name, c in optimizers.CHOICES.items()}


@pytest.mark.nightly(keep=12)
@pytest.mark.parametrize("name", optimizers.CHOICES)
def test_each_has_a_state_for_the_model(name):
  job = _toy(name, rate_factor=0.5)
  optimizer = job.task.learner.optimizer
  inner = getattr(optimizer, "optimizer", optimizer)
  expected = 0.5 * optimizers.CHOICES[name].rate
  assert inner.schedule.peak == pytest.approx(expected)
  opened = session.open_session(job, devices=jax.devices()[:1])
  assert jax.tree.leaves(opened.state_shardings.opt_state)


def test_decay_of_a_step_is_the_same_for_all():
  shares = {}
  for name, choice in optimizers.CHOICES.items():
    fields = choice.fields
    if choice.decays and "weight_decay" not in fields:
      optimizer = _toy(name, rate_factor=2.0).task.learner.optimizer
      inner = getattr(optimizer, "optimizer", optimizer)
      inner = getattr(inner, "make", inner)
      arguments = getattr(inner, "keywords", None)
      decay = arguments or vars(inner)
      shares[name] = decay["weight_decay"] * 2 * choice.rate
  assert len(shares) >= 12
  assert shares == pytest.approx(dict.fromkeys(shares, 4e-4))


def test_an_unknown_name_is_an_error():
  with pytest.raises(ValueError, match=r"'Muonn' is not in the table.*Muon"):
    _toy("Muonn")


def test_the_large_model_takes_each_by_name():
  for name in optimizers.CHOICES:
    experiment = optimizers.LmCloudSpmd2BOptimizer(optimizer_name=name)
    learner = experiment.job().task.learner
    plain = lm_cloud.LmCloudSpmd2B().job().task.learner
    assert learner.optimizer != plain.optimizer
    small = optimizers.PythonStdlibOptimizer(optimizer_name=name)
    kind = fdl.get_callable(small.job().task.learner.optimizer)
    assert fdl.get_callable(learner.optimizer) is kind
  with pytest.raises(ValueError, match="'SGDD' is not in the table"):
    optimizers.LmCloudSpmd2BOptimizer(optimizer_name="SGDD").job()
