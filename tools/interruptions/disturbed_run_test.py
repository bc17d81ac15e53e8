"""Disturbed runs end like undisturbed ones; differences are reported."""

import dataclasses
import random

import pytest

from paxon.runner.hosts import testing as forks_lib
from paxon.runner.training import process_programs
from paxon.tools.interruptions import disturbed_run, main, tiny_run

MAIN = "command_line"
# Enough to delete checkpoints and to evaluate.
NUM_STEPS = 20
# Each kind once; `tools/chaos` does many more.
PLANS = (
  ("SIGKILL", "newest checkpoint bit-flipped"),
  ("SIGTERM", "newest checkpoint truncated"),
  ("SIGINT", "disk full"),
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
  folder, processes = map(tmp_path_factory.mktemp, ("run", "processes"))
  with forks_lib.Forks(process_programs.__name__, processes) as forks:

    def launch(arguments, log):
      return forks.start(MAIN, arguments, devices=1, log=log)

    yield disturbed_run.undisturbed(folder, launch=launch, num_steps=NUM_STEPS)


@pytest.mark.parametrize("kinds", PLANS, ids=" and ".join)
def test_a_disturbed_run_ends_as_an_undisturbed_one(expected, tmp_path, kinds):
  # Random on purpose; pytest shows the seed if a test fails.
  seed = random.randrange(2**32)
  print(f"{seed = }")
  struck = disturbed_run.disturbed(
    tmp_path, kinds, expected=expected, choice=random.Random(seed)
  )
  assert [each.kind for each in struck] == list(kinds)
  assert not [problem for each in struck for problem in each.problems]


def test_a_process_is_the_real_command_line(expected):
  # All others are forks, which import nothing.
  run = tiny_run.TinyRun(expected.run.folder, num_steps=NUM_STEPS)
  ended = run.finish(run.start())
  assert ended.status == 0
  assert f"step {NUM_STEPS} already exists" in ended.output


def test_the_test_covers_all_kinds():
  assert sorted(kind for kinds in PLANS for kind in kinds) == sorted(
    disturbed_run.KINDS
  )


def test_other_arrays_and_metrics_are_reported(expected, tmp_path):
  class Other(tiny_run.TinyRun):
    def metrics(self):
      return {(1, "train"): {"loss": 0.5}}

  other = dataclasses.replace(
    expected, digest="0" * 64, run=Other(tmp_path / "run")
  )
  problems = disturbed_run._end(expected.run, NUM_STEPS, other)
  assert problems == [
    "the arrays differ from those of the undisturbed run",
    "the metrics differ from those of the undisturbed run",
  ]


def test_a_wrong_start_and_a_lost_checkpoint_are_reported():
  text = "resuming from the checkpoint of step 4\n"
  ended = tiny_run.Ended(status=0, output=text)
  assert ended.resumed_from == 4
  assert disturbed_run._start_problems(ended, 4, NUM_STEPS) == []
  assert disturbed_run._start_problems(ended, 6, NUM_STEPS) == [
    "resumed from step 4, but the newest undamaged checkpoint was of step 6"
  ]
  restarted = tiny_run.Ended(status=0, output="step 1/20  loss 5.6")
  assert disturbed_run._start_problems(restarted, 6, NUM_STEPS)
  assert disturbed_run._lost(6, 4) == [
    "the checkpoint of step 6 was lost; the newest is 4"
  ]
  assert disturbed_run._lost(None, 2) == disturbed_run._lost(4, 4) == []


def test_every_kind_comes_in_turn_and_the_seed_decides():
  plan = main.plan(50, seed=0)
  assert plan == main.plan(50, seed=0)
  assert plan != main.plan(50, seed=1)
  assert {kinds[0] for kinds in plan} == set(disturbed_run.KINDS)
  assert {len(kinds) for kinds in plan} == {1, 2, 3}


def test_the_table_counts():
  def struck(kind, newest, *problems):
    return disturbed_run.Struck(
      kind=kind, moment=1.0, status=-9, newest=newest, problems=problems
    )

  runs = [
    [struck("SIGKILL", None), struck("SIGKILL", 4)],
    [struck("disk full", 6, "it went wrong")],
  ]
  text = main.to_markdown(runs, command="tools/chaos", date="2026-01-02")
  assert "2 runs of 40 steps, disturbed 3 times. 1 resumed" in text
  assert "| SIGKILL | 2 | 1 | 1 | -9 | 0 |" in text
  assert "| disk full | 1 | 0 | 1 | -9 | 1 |" in text
  assert "Run 1, disk full after 1.00 s: it went wrong." in text


@pytest.mark.parametrize("argument", ["--runs=0", "--jobs=-1", "--runs=x"])
def test_rejects_wrong_numbers(argument, capsys):
  with pytest.raises(SystemExit) as error:
    main.run([argument])
  assert error.value.code == 2
  assert argument.partition("=")[0] in capsys.readouterr().err
