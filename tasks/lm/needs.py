"""Errors for experiments that need a missing package.

Such experiments are listed with all their knobs and can be compared; only
building their model raises.
"""

from typing import NoReturn

from paxon.runner import experiment, user_error


class MissingPartError(user_error.UserError):
  """An experiment requires a package that does not exist yet.

  Attributes:
    package: Folder of the missing package.
  """

  def __init__(self, text: str, *, package: str) -> None:
    super().__init__(text)
    self.package = package


def refuse(made: experiment.Experiment, package: str, what: str) -> NoReturn:
  """Raises `MissingPartError`.

  Args:
    made: The experiment.
    package: Folder of the missing package, such as `layers/moe`.
    what: Explanation of what is missing and of alternatives.
  """
  name = type(made).__name__
  raise MissingPartError(f"{name} needs {package}: {what}", package=package)
