"""The checkout itself follows the build rules.

It reads files that no target declares, as any file may violate a rule. So its
target is tagged `external`, which makes Bazel run it every time without using
the cache, and `local`, because only this machine has the checkout. The real
path of this file, a link in the runfiles, leads to it.
"""

import pathlib

import pytest

from paxon.tools import check_deps, dependency_budget
from paxon.tools.dependencies import workspace

_ROOT = workspace.find_root(pathlib.Path(__file__))


def test_no_rule_is_violated():
  found = check_deps.violations(_ROOT)
  if found:
    pytest.fail("\n".join(str(item) for item in found), pytrace=False)


def test_public_targets_are_within_their_budget():
  found = dependency_budget.check(_ROOT)
  if found:
    message = "\n".join([*found, dependency_budget.UPDATE])
    pytest.fail(message, pytrace=False)
