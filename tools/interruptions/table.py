"""The table of disturbed runs."""

from collections.abc import Sequence

from paxon.tools.interruptions import disturbances, disturbed_run, tiny_run

_Runs = Sequence[Sequence[disturbed_run.Struck]]


def to_markdown(runs: _Runs, *, command: str, date: str) -> str:
  """Returns a page: a row a kind, and every problem below.

  Args:
    runs: The disturbances of each run.
    command: What was run.
    date: When.
  """
  struck = [each for run in runs for each in run]
  failed = sum(any(each.problems for each in run) for run in runs)
  lines = [
    "# Interrupted runs",
    "",
    f"`{command}`, {date}: {len(runs)} runs of {tiny_run.NUM_STEPS} steps,"
    f" disturbed {len(struck)} times. {len(runs) - failed} ended with the"
    " arrays and figures of an undisturbed run, bit by bit, and went on each"
    f" time from the newest whole checkpoint; {failed} did not.",
    "",
    "| Disturbance | times | before the first checkpoint | later | exit status"
    " | problems |",
    "| --- | --- | --- | --- | --- | --- |",
  ]
  for kind in disturbances.KINDS:
    of_kind = [each for each in struck if each.kind == kind]
    early = sum(each.newest is None for each in of_kind)
    statuses = sorted({each.status for each in of_kind})
    problems = sum(bool(each.problems) for each in of_kind)
    lines.append(
      f"| {kind} | {len(of_kind)} | {early} | {len(of_kind) - early} |"
      f" {', '.join(map(str, statuses))} | {problems} |"
    )
  for number, run in enumerate(runs):
    for each in run:
      lines += [
        f"\nRun {number}, {each.kind} after {each.moment:.2f} s: {problem}."
        for problem in each.problems
      ]
  return "\n".join(lines) + "\n"
