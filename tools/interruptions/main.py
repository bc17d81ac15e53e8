"""Interrupts training runs at random and compares their results.

  tools/chaos                    # 50 runs
  tools/chaos --runs=1000 --jobs=4 --results=chaos.jsonl
  tools/chaos --only=17          # repeats one run: same kinds, same moments
  tools/chaos --exp=EXP --steps=50 --fdl.checkpoint_every_steps=5
  tools/chaos --store=s3         # in an object store
  tools/chaos --tiers            # with frequent checkpoints on local disks
  tools/chaos --markdown=docs/interruptions.md

Each run is disturbed one to three times: by SIGKILL, SIGTERM, SIGINT, SIGSTOP,
a newest checkpoint that is truncated or has one bit flipped, a full disk, a
read-only directory, a slow store, a jump of the clock, or another number of
devices. Every 25th run has two processes, of which one is killed. The disk is a
tmpfs if mounting is permitted; otherwise large files are forbidden. The exit
status is 1 if a run lost a checkpoint or ended with other results.

With --store, the runs are in an object store that is started on this machine:
s3 (SeaweedFS), az (Azurite) or gs (a server of the tests, whose requests can
also fail).

With --tiers, the runs also save to a local directory of each host, more often
than to the run directory; a lost host loses that directory.

With --results, a second command continues the first one.

By default a tiny language model is trained. With --exp, an experiment of yours:
--fdl. flags set its knobs, as for a training. It must save several times within
--steps.
"""

import argparse
from collections.abc import Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import datetime
import json
import pathlib
import random
import shutil
import statistics
import sys
import tempfile
import threading
from typing import Any

import pytest

from paxon.inputs.store_servers import servers
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.hosts import warm_python
from paxon.tools.interruptions import (
  disturbances,
  disturbed_run,
  lost_host,
  program,
  tiny_run,
)

_LOST_HOST_EVERY = 25
_KINDS = (*disturbances.KINDS, lost_host.KIND)


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(
    prog="tools/chaos",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument(
    "--runs", type=_positive, default=50, help="number of runs; default 50"
  )
  parser.add_argument("--exp", help="another experiment than the tiny model")
  parser.add_argument(
    "--steps",
    type=_positive,
    default=tiny_run.NUM_STEPS,
    help=f"training steps of each run; default {tiny_run.NUM_STEPS}",
  )
  parser.add_argument(
    "--store",
    choices=("gs", "s3", "az"),
    help="keep the runs in an object store; default: on a disk",
  )
  parser.add_argument(
    "--tiers",
    action="store_true",
    help="also save to local disks; --exp needs local_checkpoint_every_steps",
  )
  parser.add_argument("--seed", type=int, default=0, help="random seed")
  parser.add_argument(
    "--only", type=int, metavar="RUN", help="repeats one run, by its number"
  )
  parser.add_argument(
    "--jobs", type=_positive, default=2, help="parallel runs; default 2"
  )
  parser.add_argument(
    "--results",
    type=pathlib.Path,
    help="a file of one line per run; runs in it are not repeated",
  )
  parser.add_argument(
    "--markdown", type=pathlib.Path, help="write a page with the table"
  )
  return parser


def run(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit status."""
  parser = make_parser()
  options, knobs = parser.parse_known_args(argv)
  for argument in knobs:
    if not (options.exp and argument.startswith("--fdl.")):
      parser.error(
        f"unknown argument {argument}; knobs are --fdl.NAME=VALUE after --exp"
      )
  options.training = tiny_run.TINY_TIERS if options.tiers else tiny_run.TINY_LM
  if options.exp:
    options.training = (f"--exp={options.exp}", *knobs)
  if options.only is not None and options.only < 0:
    parser.error(f"--only must be at least 0, got {options.only}")
  for path in (options.markdown, options.results):
    if path and not path.absolute().parent.is_dir():
      parser.error(f"the folder of {path} does not exist")
  found = {}
  try:
    if options.results:
      found = read_results(options.results, _campaign(options))
  except ValueError as error:
    parser.error(str(error))
  with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
    try:
      found |= _runs(pathlib.Path(folder), options, done=found)
    except disturbed_run.UndisturbedError as error:
      print(error, file=sys.stderr)
      return 2
    except pytest.skip.Exception as error:
      parser.error(f"--store={options.store}: {error.msg}")
  command = " ".join(["tools/chaos", *argv])
  text = to_markdown(
    dict(sorted(found.items())),
    command=command,
    date=datetime.date.today().isoformat(),
    num_steps=options.steps,
  )
  print(text)
  if options.markdown:
    options.markdown.write_text(text)
  return (
    1 if any(each.problems for one in found.values() for each in one) else 0
  )


def plan(
  number: int, seed: int, *, place: str = disturbances.DISK
) -> list[str]:
  """Returns the disturbances of a run; the first ones take turns.

  Args:
    number: Of the run, from 0.
    seed: Decides the others.
    place: Where the run is, one of `Disturbance.places`.
  """
  if number % _LOST_HOST_EVERY == _LOST_HOST_EVERY - 1:
    return [lost_host.KIND]
  choice = random.Random(f"{seed} {number}")
  kinds = [k for k, v in disturbances.KINDS.items() if place in v.places]
  return [
    kinds[number % len(kinds)],
    *choice.choices(kinds, k=choice.choice((0, 0, 1, 2))),
  ]


def to_markdown(
  runs: Mapping[int, Sequence[disturbed_run.Struck]],
  *,
  command: str,
  date: str,
  num_steps: int = tiny_run.NUM_STEPS,
) -> str:
  """Returns a page with a table by kind of disturbance, and all problems.

  Args:
    runs: The disturbances of each run, by its number.
    command: The command that made them.
    date: Its date.
    num_steps: Training steps of each run.
  """
  struck = [each for run in runs.values() for each in run]
  failed = sum(any(each.problems for each in run) for run in runs.values())
  lines = [
    "# Interrupted runs",
    "",
    f"`{command}`, {date}: {len(runs)} runs of {num_steps} steps,"
    f" disturbed {len(struck)} times. {len(runs) - failed} resumed each time"
    " from the newest undamaged checkpoint and ended with the arrays and"
    " metrics of an undisturbed run, bit by bit (after a change of the number"
    f" of devices: up to rounding); {failed} did not.",
    "",
    "Recovery: seconds from the disturbance to the next training step, with a"
    " process that is started as soon as the disturbed one has ended, on a"
    " machine that runs other work too. A started process imports nothing: it"
    " is a fork.",
    "",
    "| Disturbance | Times | Before the first checkpoint | Later | Exit status"
    " | Recovery: median, worst | Problems |",
    "| --- | --- | --- | --- | --- | --- | --- |",
  ]
  for kind in _KINDS:
    of_kind = [each for each in struck if each.kind == kind]
    if not of_kind:
      continue
    early = sum(each.newest is None for each in of_kind)
    statuses = sorted({each.status for each in of_kind})
    problems = sum(bool(each.problems) for each in of_kind)
    lines.append(
      f"| {kind} | {len(of_kind)} | {early} | {len(of_kind) - early} |"
      f" {', '.join(map(str, statuses))} | {_recovery(of_kind)} | {problems} |"
    )
  for number, run in runs.items():
    for each in run:
      lines += [
        f"\nRun {number}, {each.kind} after {each.moment:.2f} s: {problem}."
        for problem in each.problems
      ]
  return "\n".join(lines) + "\n"


def _recovery(struck: Sequence[disturbed_run.Struck]) -> str:
  seconds = [each.recovery for each in struck if each.recovery is not None]
  if not seconds:
    return "-"
  return f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s"


def _campaign(options: argparse.Namespace) -> list[str]:
  """Returns the settings shared by all runs of a file of results."""
  return [
    f"--seed={options.seed}",
    f"--steps={options.steps}",
    *([f"--store={options.store}"] if options.store else []),
    *(["--tiers"] if options.tiers else []),
    *options.training,
  ]


def read_results(
  path: pathlib.Path, campaign: Sequence[str]
) -> dict[int, list[disturbed_run.Struck]]:
  """Returns the runs of a file of results, by number.

  Raises:
    ValueError: They belong to another campaign.
  """
  if not path.exists():
    return {}
  found = {}
  for line in path.read_text().splitlines():
    record = json.loads(line)
    if record["campaign"] != list(campaign):
      raise ValueError(
        f"--results={path} has runs of {' '.join(record['campaign'])}, but this"
        f" command has {' '.join(campaign)}; name another file."
      )
    fields: list[dict[str, Any]] = record["struck"]
    found[record["run"]] = [
      disturbed_run.Struck(**(each | {"problems": tuple(each["problems"])}))
      for each in fields
    ]
  return found


def append_result(
  path: pathlib.Path,
  number: int,
  struck: Sequence[disturbed_run.Struck],
  campaign: Sequence[str],
) -> None:
  """Adds a run to a file of results."""
  record = {
    "run": number,
    "campaign": list(campaign),
    "struck": [dataclasses.asdict(s) for s in struck],
  }
  with path.open("a") as file:
    file.write(f"{json.dumps(record)}\n")


@dataclasses.dataclass(kw_only=True)
class _Campaign:
  """Runs with shared processes and undisturbed results."""

  folder: pathlib.Path
  seed: int
  launch: tiny_run.Launch
  supervised: tiny_run.Launch
  expected: disturbed_run.Expected
  place: str = disturbances.DISK
  # Made for the first run that needs it.
  by_hosts: disturbed_run.Expected | None = None
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

  def run(self, number: int) -> list[disturbed_run.Struck]:
    """Disturbs one run and prints its verdict."""
    kinds = plan(number, self.seed, place=self.place)
    folder = _new(self.folder, f"run_{number}")
    choice = random.Random(f"{self.seed} {number} moments")
    try:
      struck = self._disturb(folder, kinds, choice)
    # One run must not end the others.
    except Exception as error:
      struck = [
        disturbed_run.Struck(
          kind=kinds[0],
          moment=0.0,
          status=-1,
          newest=None,
          problems=(f"tools/chaos failed: {error!r}",),
        )
      ]
    shutil.rmtree(folder, ignore_errors=True)
    problems = [problem for each in struck for problem in each.problems]
    verdict = "equal"
    if problems:
      again = f"tools/chaos --seed={self.seed} --only={number}"
      if self.place != disturbances.DISK:
        again += f" --store={self.place}"
      again += " --tiers" * self.expected.run.has_tiers
      verdict = f"{'; '.join(problems)}; again: {again}"
    print(f"run {number}: {', '.join(kinds)}: {verdict}", file=sys.stderr)
    return struck

  def _disturb(
    self, folder: pathlib.Path, kinds: list[str], choice: random.Random
  ) -> list[disturbed_run.Struck]:
    if kinds != [lost_host.KIND]:
      return disturbed_run.run_disturbed(
        folder, kinds, expected=self.expected, choice=choice
      )
    expected = self._expected_by_hosts()
    supervised = self.supervised
    return [
      lost_host.lose(
        folder, supervised=supervised, expected=expected, choice=choice
      )
    ]

  def _expected_by_hosts(self) -> disturbed_run.Expected:
    with self.lock:
      if self.by_hosts is None:
        self.by_hosts = lost_host.run_undisturbed(
          _new(self.folder, "undisturbed_hosts"),
          launch=self.launch,
          num_steps=self.expected.run.num_steps,
          training=self.expected.run.training,
          store=self.expected.run.store,
          has_tiers=self.expected.run.has_tiers,
        )
      return self.by_hosts


def _runs(
  folder: pathlib.Path,
  options: argparse.Namespace,
  *,
  done: Any,
) -> dict[int, list[disturbed_run.Struck]]:
  numbers = [n for n in range(options.runs) if n not in done]
  if options.only is not None:
    numbers = [options.only]
  found = {}
  with contextlib.ExitStack() as stack:
    forks = stack.enter_context(
      forks_lib.Forks(program.__name__, _new(folder, "processes"))
    )
    store = None
    if options.store:
      place = _new(folder, "store")
      store = stack.enter_context(servers.run(options.store, place))
    warm = stack.enter_context(
      warm_python.WarmPython([program.__name__], _new(folder, "python"))
    )

    def launch(arguments, log, *, devices, environ):
      return forks.start(
        "command_line", arguments, devices=devices, log=log, environ=environ
      )

    def start_supervised(arguments, log, *, devices, environ):
      cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
      return forks.start(
        "supervised",
        [warm.executable, *arguments],
        devices=devices,
        log=log,
        environ={**cpu, **environ},
      )

    campaign = _Campaign(
      folder=folder,
      seed=options.seed,
      launch=launch,
      supervised=start_supervised,
      expected=disturbed_run.run_undisturbed(
        _new(folder, "undisturbed"),
        launch=launch,
        num_steps=options.steps,
        training=options.training,
        store=store,
        has_tiers=options.tiers,
      ),
      place=options.store or disturbances.DISK,
    )
    pool = stack.enter_context(futures.ThreadPoolExecutor(options.jobs))
    pending = {pool.submit(campaign.run, n): n for n in numbers}
    for each in futures.as_completed(pending):
      number = pending[each]
      found[number] = each.result()
      if options.results:
        append_result(
          options.results, number, found[number], _campaign(options)
        )
  return found


def _new(folder: pathlib.Path, name: str) -> pathlib.Path:
  path = folder / name
  path.mkdir()
  return path


def _positive(text: str) -> int:
  value = int(text)
  if value <= 0:
    raise argparse.ArgumentTypeError(f"must be positive, got {value}")
  return value


if __name__ == "__main__":
  sys.exit(run(sys.argv[1:]))
