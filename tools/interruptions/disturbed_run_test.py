"""Disturbed runs end like undisturbed ones; differences are reported."""

import dataclasses
import json
import pathlib
import random

import numpy as np
import pytest

from paxon.inputs.store_servers import servers
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.hosts import warm_python
from paxon.tools.interruptions import (
  disturbances,
  disturbed_run,
  lost_host,
  main,
  program,
  tiny_run,
)

MAIN = "command_line"
NUM_STEPS = tiny_run.NUM_STEPS
# Each kind once, less the one that sleeps; `tools/chaos` does many more.
SLEEPS = "SIGSTOP, then SIGCONT"
PLANS = (
  ("SIGKILL", "newest checkpoint bit-flipped"),
  ("SIGTERM", "newest checkpoint truncated", "slow store and SIGKILL"),
  ("SIGINT", "disk full", "read-only store"),
  ("clock shift and SIGKILL", "killed, then other devices"),
)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
  processes = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(program.__name__, processes) as forks:

    def start(arguments, log, *, devices, environ):
      return forks.start(
        MAIN, arguments, devices=devices, log=log, environ=environ
      )

    start.forks = forks
    yield start


@pytest.fixture(scope="module")
def expected(tmp_path_factory, launch):
  folder = tmp_path_factory.mktemp("run")
  return disturbed_run.run_undisturbed(
    folder, launch=launch, num_steps=NUM_STEPS
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kinds", PLANS, ids=" and ".join)
def test_a_disturbed_run_ends_as_an_undisturbed_one(expected, tmp_path, kinds):
  # Random on purpose; pytest shows the seed if a test fails.
  seed = random.randrange(2**32)
  print(f"{seed = }")
  struck = disturbed_run.run_disturbed(
    tmp_path, kinds, expected=expected, choice=random.Random(seed)
  )
  assert [each.kind for each in struck] == list(kinds)
  assert not [problem for each in struck for problem in each.problems]
  assert all(each.recovery is None or each.recovery > 0 for each in struck)


@pytest.mark.nightly
def test_a_run_survives_a_lost_host(launch, tmp_path):
  for name in ("whole", "lost", "python"):
    (tmp_path / name).mkdir()
  whole = lost_host.run_undisturbed(
    tmp_path / "whole", launch=launch, num_steps=NUM_STEPS
  )
  modules = [program.__name__]
  with warm_python.WarmPython(modules, tmp_path / "python") as warm:

    def supervised(arguments, log, *, devices, environ):
      cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
      return launch.forks.start(
        "supervised",
        [warm.executable, *arguments],
        devices=devices,
        log=log,
        environ={**cpu, **environ},
      )

    struck = lost_host.lose(
      tmp_path / "lost",
      supervised=supervised,
      expected=whole,
      choice=random.Random(1),
    )
  assert not struck.problems
  assert (struck.status, struck.newest) == (0, NUM_STEPS)
  assert struck.recovery is not None


@pytest.mark.nightly
def test_a_process_is_the_real_command_line(expected):
  # All others are forks, which import nothing.
  run = tiny_run.TinyRun(expected.run.folder, num_steps=NUM_STEPS)
  ended = run.finish(run.start())
  assert ended.status == 0
  assert f"step {NUM_STEPS} already exists" in ended.output


def test_the_test_covers_all_kinds():
  assert sorted([kind for kinds in PLANS for kind in kinds] + [SLEEPS]) == (
    sorted(_kinds_of(disturbances.DISK))
  )


def _kinds_of(place):
  return [k for k, v in disturbances.KINDS.items() if place in v.places]


@pytest.mark.nightly
def test_a_run_in_a_store_is_disturbed(launch, tmp_path):
  for name in ("server", "undisturbed", "disturbed"):
    (tmp_path / name).mkdir()
  with servers.run("gs", tmp_path / "server") as store:
    expected = disturbed_run.run_undisturbed(
      tmp_path / "undisturbed", launch=launch, store=store
    )
    kinds = ("newest checkpoint truncated", "store down for seconds")
    struck = disturbed_run.run_disturbed(
      tmp_path / "disturbed", kinds, expected=expected, choice=random.Random(0)
    )
  assert [each.kind for each in struck] == list(kinds)
  assert not [problem for each in struck for problem in each.problems]


def test_other_arrays_and_metrics_are_reported(expected, tmp_path):
  class Other(tiny_run.TinyRun):
    def metrics(self):
      return {(1, "train"): {"loss": 0.5}}

    def arrays(self):
      return {"params/x": np.zeros(2)}

  other = dataclasses.replace(
    expected, digest="0" * 64, run=Other(tmp_path / "run")
  )
  ended = tiny_run.Ended(status=0, output="")

  def problems(*, exact):
    return disturbed_run.find_problems(
      ended, expected.run, other, newest=NUM_STEPS, exact=exact
    )

  assert problems(exact=True) == [
    "the arrays differ from those of the undisturbed run",
    "the metrics differ from those of the undisturbed run",
  ]
  assert problems(exact=False) == [
    "the arrays differ by more than rounding",
    "the metrics differ by more than rounding",
  ]


def test_a_traceback_and_a_failure_are_reported(expected):
  run = expected.run
  for status, output, problem in (
    (
      0,
      "Traceback (most recent call last):\nx: y",
      "a traceback was printed: ",
    ),
    (1, "a\nb", "the last process failed (1): b"),
  ):
    ended = tiny_run.Ended(status=status, output=output)
    found = disturbed_run.find_problems(
      ended, run, expected, newest=NUM_STEPS, exact=True
    )
    assert problem in found[0]


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
  assert disturbed_run._find_lost(6, 4) == [
    "the checkpoint of step 6 was lost; the newest is 4"
  ]
  assert (
    disturbed_run._find_lost(None, 2) == disturbed_run._find_lost(4, 4) == []
  )


def test_every_kind_comes_in_turn_and_the_seed_decides():
  plans = [main.plan(number, 0) for number in range(100)]
  assert plans == [main.plan(number, 0) for number in range(100)]
  assert plans != [main.plan(number, 1) for number in range(100)]
  kinds = {*_kinds_of(disturbances.DISK), lost_host.KIND}
  assert {plan[0] for plan in plans} == kinds
  plans_of_store = [main.plan(number, 0, place="gs") for number in range(100)]
  kinds = {*_kinds_of("gs"), lost_host.KIND}
  assert {plan[0] for plan in plans_of_store} == kinds
  assert "every fifth request fails" in kinds
  assert {len(plan) for plan in plans} == {1, 2, 3}
  assert plans.count([lost_host.KIND]) == 4


def _struck(kind, newest, *problems, recovery=None):
  return disturbed_run.Struck(
    kind=kind,
    moment=1.0,
    status=-9,
    newest=newest,
    problems=problems,
    recovery=recovery,
  )


def test_the_table_counts():
  runs = {
    0: [
      _struck("SIGKILL", None, recovery=2.0),
      _struck("SIGKILL", 4, recovery=4.0),
    ],
    7: [_struck("disk full", 6, "it went wrong")],
  }
  text = main.to_markdown(runs, command="tools/chaos", date="2026-01-02")
  assert "2 runs of 16 steps, disturbed 3 times. 1 resumed" in text
  assert "| SIGKILL | 2 | 1 | 1 | -9 | 3.0 s, 4.0 s | 0 |" in text
  assert "| disk full | 1 | 0 | 1 | -9 | - | 1 |" in text
  assert "Run 7, disk full after 1.00 s: it went wrong." in text


def test_a_second_command_continues_the_results(tmp_path):
  path: pathlib.Path = tmp_path / "results.jsonl"
  assert main.read_results(path, ["--seed=0"]) == {}
  runs = {3: [_struck("SIGKILL", 4, "a", recovery=0.5)]}
  for number, struck in runs.items():
    main.append_result(path, number, struck, ["--seed=0"])
  assert main.read_results(path, ["--seed=0"]) == runs
  assert json.loads(path.read_text())["run"] == 3
  # Of another campaign, they are not mixed.
  with pytest.raises(
    ValueError, match=r"has runs of --seed=0, but .* --seed=1;"
  ):
    main.read_results(path, ["--seed=1"])


@pytest.mark.parametrize(
  "argument", ["--runs=0", "--jobs=-1", "--runs=x", "--only=-1"]
)
def test_rejects_wrong_numbers(argument, capsys):
  with pytest.raises(SystemExit) as error:
    main.run([argument])
  assert error.value.code == 2
  assert argument.partition("=")[0] in capsys.readouterr().err


def test_wrong_arguments(capsys, tmp_path):
  with pytest.raises(SystemExit):
    main.run(["--fdl.num_layers=1"])
  assert "unknown argument --fdl.num_layers=1; knobs" in capsys.readouterr().err
  path = tmp_path / "results.jsonl"
  main.append_result(path, 0, [_struck("SIGKILL", 4)], ["--seed=7"])
  with pytest.raises(SystemExit):
    main.run([f"--results={path}"])
  assert "has runs of --seed=7, but this command" in capsys.readouterr().err
  # A process tells what is wrong, before any is disturbed.
  assert main.run(["--exp=a.B", "--fdl.seed=1", "--runs=1"]) == 2
  err = capsys.readouterr().err
  assert err.startswith("The undisturbed run failed:\n--exp=a.B: ")
