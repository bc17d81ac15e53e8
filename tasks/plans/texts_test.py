"""Tests of the list of stored texts."""

import pytest

from paxon.runner.configuration import overrides, resolving
from paxon.runner.plan import target, testing
from paxon.tasks.plans import texts


def test_each_stored_file_is_in_the_list():
  stored = {
    path.relative_to(testing.TESTDATA).as_posix().removesuffix(".txt.gz")
    for path in testing.TESTDATA.glob("**/*.gz")
  }
  newer = {name for name in stored if name.startswith("jax_0_11/")}
  assert stored - newer == set(texts.TEXTS)
  assert {name.partition("/")[2] for name in newer} == set(texts.NEWER)


@pytest.mark.parametrize("text", texts.TEXTS.values(), ids=lambda t: t.name)
def test_the_experiment_of_a_text_runs_on_its_target(text):
  given = [overrides.Override(*item) for item in text.knobs.items()]
  job = resolving.build(resolving.resolve(text.experiment, given).config)
  assert str(job.mesh) == text.knobs["mesh"]
  assert target.parse(text.target).num_devices in (8, 16)


def test_what_is_not_read_is_left_out_and_nothing_else():
  text = testing.read_text("h200_1x8_fp8.txt.gz")
  assert testing.shorten(text) == text
  line = '  %a = f32[2]{0} custom-call(%b), custom_call_target="mine"'
  config = '"cost_estimate":{"flops":"7","bytes_accessed":"1"},"body":"QUJD"'
  short = testing.shorten(f"%m {{\n{line}, backend_config={{{config}}}\n}}\n")
  assert '"flops":"7"' in short
  assert "QUJD" not in short


def test_a_pattern_without_a_text_is_an_error(capsys):
  assert texts.main(["v9*"]) != 0
  assert texts.main([]) == 0
  assert "h200_1x8_fp8" in capsys.readouterr().out
