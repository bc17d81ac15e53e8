"""Writes the page on schedules of pipelines, and its pictures.

tools/schedules                from simulation
tools/schedules --measure      and times steps on four fake devices
"""

import argparse
from collections.abc import Sequence
import datetime
import pathlib
import sys
from typing import Final

import jax

from paxon.tools import schedules_measurement, schedules_page

_ROOT: Final = pathlib.Path(__file__).parent.parent
_HEADINGS: Final = (
  "Schedule",
  "ms a step",
  "sequential, ms",
  "ratio",
  "temporary MB of a device",
)


def main(arguments: Sequence[str]) -> int:
  """Writes the page; returns the status of the process."""
  parser = argparse.ArgumentParser(
    prog="tools/schedules", description="Writes docs/pipeline_schedules.md."
  )
  parser.add_argument(
    "--measure", action="store_true", help="time steps on four fake devices"
  )
  parser.add_argument(
    "--rounds", type=int, default=11, help="how often each step is timed"
  )
  options = parser.parse_args(arguments)
  path = _ROOT / schedules_page.PAGE
  measured = "Not measured yet: run `tools/schedules --measure`."
  if options.measure:
    measured = _measured(options.rounds)
  elif path.exists():
    measured = schedules_page.measured_part(path.read_text())
  path.write_text(schedules_page.page(measured))
  for name, svg in schedules_page.pictures().items():
    (_ROOT / name).write_text(svg)
  print(f"wrote {schedules_page.PAGE}")
  return 0


def _measured(rounds: int) -> str:
  rows = schedules_measurement.measure(rounds=rounds)
  sizes = (
    f"{schedules_measurement.NUM_STAGES} stages,"
    f" {schedules_measurement.NUM_MICROBATCHES} microbatches of"
    f" {schedules_measurement.ROWS} x {schedules_measurement.LENGTH} tokens,"
    f" {schedules_measurement.NUM_LAYERS} layers of width"
    f" {schedules_measurement.EMBED}"
  )
  today = datetime.date.today()
  return (
    f"Measured on {today} with jax {jax.__version__}: {sizes}; medians of"
    f" {rounds} rounds, the ratio that of neighbours.\n\n"
    + schedules_page.to_table(_HEADINGS, rows)
  )


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
