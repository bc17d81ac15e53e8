"""Tests for runs as objects of a notebook."""

import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.training import interactive, testing

STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  experiment = testing.TinyLm(
    num_train_steps=STEPS, eval_every_steps=2, max_new_tokens=4
  )
  return interactive.train(experiment, tmp_path_factory.mktemp("runs") / "a")


@pytest.mark.nightly
def test_history_is_arrays_of_each_split(run):
  history = run.history()
  np.testing.assert_array_equal(history["step"], range(1, STEPS + 1))
  assert history["loss"].shape == (STEPS,)
  assert np.isfinite(history["loss"]).all()
  np.testing.assert_array_equal(run.history("validation")["step"], [2, 4])
  with pytest.raises(user_error.UserError, match="'test'; it has train, valid"):
    run.history("test")


def test_a_loaded_run_is_the_trained_one(run):
  again = interactive.load(run.run_dir)
  assert again.experiment.given_knobs() == run.experiment.given_knobs()
  one, two = (each.decode(["def ", "x"]) for each in (run, again))
  assert [sample.ids for sample in one] == [sample.ids for sample in two]
  assert one[0].prompt == "def "
  assert int(again.state.step) == STEPS


def test_settings_of_samples_are_those_of_generation_and_sampling(run):
  drawn = run.decode(["x"], num_samples=2, temperature=1.0, max_new_tokens=2)
  assert [len(sample.ids) for sample in drawn] == [2, 2]
  with pytest.raises(user_error.UserError, match="no setting 'temprature'"):
    run.decode(["x"], temprature=1.0)


def test_a_run_is_continued(run):
  longer = run.train(num_train_steps=STEPS + 2)
  np.testing.assert_array_equal(longer.history()["step"], range(1, 7))
  assert int(longer.state.step) == STEPS + 2
  chart = longer.plot("loss", run)
  # Both are the same folder.
  assert [each.name for each in chart.series] == ["train", "validation"]


def test_a_knob_without_text_is_an_error(tmp_path):
  class Adjusted(testing.TinyLm):
    function: object = None

  with pytest.raises(user_error.UserError, match=r"function=.*in a subclass"):
    interactive.train(Adjusted(function=print), tmp_path / "c")
  assert not (tmp_path / "c").exists()
