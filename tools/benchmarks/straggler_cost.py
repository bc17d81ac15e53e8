"""Train steps of several processes with and without the straggler report.

  tools/python -m paxon.tools.benchmarks.straggler_cost [--processes=2]
    [--rounds=11] [--steps=20]

Starts processes on this machine, with one CPU device each. Blocks of steps with
the hook of `runner/training/stragglers` alternate with blocks without it; both
read the loss of a step after the next one is dispatched, as the training loop
does, and one report ends each block. Process 0 prints the time of a step.
"""

import argparse
from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys

import jax

from paxon.runner.hosts import agreement, joining, process_settings
from paxon.runner.monitoring import observer as observer_lib
from paxon.runner.training import hooks, stragglers
from paxon.tools.benchmarks import cases, decoder_lm_workload, timing

_SUMMARY = "summary_every_steps"


def measure(*, rounds: int, steps: int) -> timing.Pairs:
  """Returns seconds of a step with the hook, and without it.

  Args:
    rounds: Number of blocks of each.
    steps: Steps of a block, which ends with a report.
  """
  # Short steps, of which the hook is a larger share.
  workload = dataclasses.replace(cases.QUICKSTART, length=32)
  ours = decoder_lm_workload.compile_ours(
    workload.job(mesh="data=-1", **{_SUMMARY: steps})
  )
  observer = observer_lib.Observer()
  hook = stragglers.Stragglers(ours.session, observer)
  with contextlib.closing(hook):
    found = timing.interleave(
      _make_block(ours, steps, hook.wrap, observer.sources[0]),
      _make_block(ours, steps, lambda _, step: step, dict),
      rounds=rounds,
    )
  return timing.Pairs(
    first=tuple(seconds / steps for seconds in found.first),
    second=tuple(seconds / steps for seconds in found.second),
  )


def _make_block(
  ours: decoder_lm_workload.OurSteps,
  steps: int,
  wrap: Callable[[int, hooks.Step], hooks.Step],
  report: Callable[[], object],
) -> Callable[[], None]:
  """Returns a function that runs a block of steps and ends with a report."""
  state = ours.session.initial_state()

  def run() -> None:
    nonlocal state
    before = None
    for step in range(1, steps + 1):
      batch = ours.batches[step % len(ours.batches)]
      state, metrics = wrap(step, ours.step)(state, batch)
      if before is not None:
        jax.block_until_ready(before)
      before = metrics["loss"]
    report()
    jax.block_until_ready(state)

  return run


def to_lines(pairs: timing.Pairs) -> list[str]:
  """Returns the times of a step as text."""
  with_hook, without, ratio = map(
    timing.median_interval, (pairs.first, pairs.second, pairs.ratios())
  )
  return [
    f"step with the report:    {1e3 * with_hook.median:.3f} ms",
    f"step without:            {1e3 * without.median:.3f} ms",
    f"ratio: {ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})",
  ]


def main(argv: Sequence[str]) -> int:
  """Starts the processes, or is one of them; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--processes", type=int, default=2)
  parser.add_argument("--rounds", type=int, default=11)
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
  parser.add_argument("--address", help=argparse.SUPPRESS)
  given = parser.parse_args(argv)
  if given.processes < 2:
    parser.error(f"--processes must be at least 2, got {given.processes}")
  if given.process is None:
    return _start(argv, given.processes)
  settings = process_settings.ProcessSettings(
    coordinator_address=given.address,
    num_processes=given.processes,
    process_id=given.process,
  )
  joining.join(settings, os.environ)
  with joining.exit_together():
    pairs = measure(rounds=given.rounds, steps=given.steps)
    if agreement.is_first():
      print("\n".join(to_lines(pairs)))
  return 0


def _start(argv: Sequence[str], count: int) -> int:
  """Runs this program in several processes; returns the largest status."""
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    address = f"--address=localhost:{listener.getsockname()[1]}"
  command = [sys.executable, "-m", "paxon.tools.benchmarks.straggler_cost"]
  environ = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
  processes = [
    subprocess.Popen(
      [*command, *argv, address, f"--process={index}"], env=environ
    )
    for index in range(count)
  ]
  return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
