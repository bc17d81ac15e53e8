"""Which steps to profile: `--profile_steps=10:13`. Knows nothing of jax."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class ProfileWindow:
  """Steps as Python's slices: `10:13` are the steps 10, 11 and 12.

  Attributes:
    first: The first step, from 1.
    stop: The step after the last one.
  """

  first: int
  stop: int

  def __contains__(self, step: int) -> bool:
    return self.first <= step < self.stop

  def __str__(self) -> str:
    return f"{self.first}:{self.stop}"


def parse(text: str) -> ProfileWindow:
  """Reads `FIRST:STOP`.

  Args:
    text: As typed.

  Raises:
    ValueError: It is not two numbers of steps, or holds no step.
  """
  found = re.fullmatch(r"(\d+):(\d+)", text.strip())
  if found is None:
    raise ValueError(
      f"--profile_steps={text} must be two numbers of steps, such as 10:13 for"
      " the steps 10, 11 and 12."
    )
  window = ProfileWindow(int(found[1]), int(found[2]))
  if window.first < 1:
    raise ValueError(f"--profile_steps={text}: the first step has number 1.")
  if window.stop <= window.first:
    raise ValueError(
      f"--profile_steps={text} holds no step: the second number is that of the"
      f" step after the last one, so it must be at least {window.first + 1}."
    )
  return window


def check(window: ProfileWindow, *, num_train_steps: int) -> None:
  """Checks that a training has the steps.

  Args:
    window: What to profile.
    num_train_steps: The last step.

  Raises:
    ValueError: It has not.
  """
  if window.stop - 1 > num_train_steps:
    raise ValueError(
      f"--profile_steps={window} goes on to step {window.stop - 1}, but"
      f" num_train_steps is {num_train_steps}."
    )
