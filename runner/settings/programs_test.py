"""Tests of the checks of an experiment's programs."""

import dataclasses

import pytest

from paxon.runner.settings import programs


@dataclasses.dataclass(kw_only=True)
class _Nothing:
  """Does nothing."""

  name: str = "nothing"
  every_steps: int | None = None

  def run(self, context):
    """Returns no metrics."""
    del context
    return {}


def test_good_programs_pass():
  made = [_Nothing(), _Nothing(name="other", every_steps=3)]
  programs.check(made, {"validation": None})


@pytest.mark.parametrize(
  ("made", "message"),
  [
    ([_Nothing(name="validation")], "must differ"),
    ([_Nothing(name="train")], "must differ"),
    ([_Nothing(), _Nothing()], "must differ"),
    ([_Nothing(name="")], "must differ"),
    ([_Nothing(every_steps=0)], "'nothing' must be positive, got 0"),
  ],
)
def test_bad_programs_are_errors(made, message):
  with pytest.raises(ValueError, match=message):
    programs.check(made, {"validation": None})
