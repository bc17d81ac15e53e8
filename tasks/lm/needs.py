"""Errors for experiments that need a missing package.

Such experiments are listed with all their knobs and can be compared; only
building their model raises.
"""

from typing import NoReturn

from paxon.runner import experiment, user_error


class MissingPartError(user_error.UserError):
  """An experiment needs a package that does not exist yet.

  Attributes:
    package: The folder that will have the part.
  """

  def __init__(self, text: str, *, package: str) -> None:
    super().__init__(text)
    self.package = package


def refuse(made: experiment.Experiment, package: str, what: str) -> NoReturn:
  """Raises `MissingPartError`.

  Args:
    made: The experiment.
    package: The folder that will have the part, such as `layers/moe`.
    what: What that part is, and what can be done without.
  """
  name = type(made).__name__
  raise MissingPartError(f"{name} needs {package}: {what}", package=package)
