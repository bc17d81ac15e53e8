"""The checkout itself follows the rules of the build.

It reads files that no target declares, as any file may break a rule. So its
target is tagged `external`, which makes Bazel run it every time and never
take its result from the cache, and `local`, as only here is the checkout. The
way to it is the real path of this file, which is a link in the runfiles.
"""

import pathlib

import pytest

from paxon.tools import check_deps, dependency_budget
from paxon.tools.dependencies import workspace

_ROOT = workspace.find_root(pathlib.Path(__file__))


def test_no_rule_is_broken():
  found = check_deps.violations(_ROOT)
  if found:
    pytest.fail("\n".join(str(item) for item in found), pytrace=False)


def test_public_targets_drag_in_what_was_agreed():
  found = dependency_budget.check(_ROOT)
  if found:
    message = "\n".join([*found, dependency_budget.UPDATE])
    pytest.fail(message, pytrace=False)
