"""Programs of an experiment that run during training."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Program(Protocol):
  """Runs at steps of the training, such as `training.programs.DecodeFile`."""

  @property
  def name(self) -> str:
    """Split under which its metrics are written; unique in a job."""
    ...

  @property
  def every_steps(self) -> int | None:
    """Interval of steps; None runs it only at the end of training."""
    ...

  def run(self, context: Any) -> Mapping[str, float]:
    """Runs the program; returns metrics, or nothing.

    Training waits. A run that is killed meanwhile repeats the call from the
    checkpoint of its step, so the program must replace what it has written.

    Args:
      context: A `training.programs.Context`.
    """
    ...


@runtime_checkable
class CheckedProgram(Program, Protocol):
  """A program that can find mistakes before training starts."""

  def check(self, session: Any) -> None:
    """Raises UserError for a mistake; `session` is a `session.Session`."""
    ...


def check(programs: Sequence[Program], splits: Mapping[str, Any]) -> None:
  """Raises ValueError for names or intervals that are not valid.

  Args:
    programs: Programs of a job.
    splits: Its evaluation splits.
  """
  names = ["train", *splits]
  for program in programs:
    if not isinstance(program, Program):
      raise ValueError(
        "Job.programs must have name, every_steps and run, got"
        f" {type(program).__name__}."
      )
    if not program.name or program.name in names:
      raise ValueError(
        f"Job.programs: the name {program.name!r} must differ from other"
        f" programs and splits, {', '.join(names)}."
      )
    names.append(program.name)
    if program.every_steps is not None and program.every_steps < 1:
      raise ValueError(
        f"Job.programs: every_steps of {program.name!r} must be positive, got"
        f" {program.every_steps}."
      )
