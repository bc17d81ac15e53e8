"""The configuration of a run, stored in its folder and compared on return."""

from etils import epath
import fiddle as fdl

from paxon.runner import files, run_dir, user_error
from paxon.runner.configuration import comparison, dump, tree

# May change too, where the number of steps has: a schedule spans a run.
_SCHEDULE = ".schedule."
_LENGTH = "num_train_steps"


def check(config: fdl.Buildable, folder: epath.Path) -> list[str]:
  """Compares a configuration with the one that a run has stored.

  Args:
    config: The root of the resolved configuration.
    folder: Of a run that has made steps.

  Returns:
    What differs and may differ, one line a value.

  Raises:
    UserError: Something differs that would make it another run.
  """
  stored = folder / run_dir.CONFIG_TEXT
  if not stored.exists():
    return []
  before = stored.read_text()
  changes = comparison.differences(before, dump.to_text(config))
  # A field that a later version has added, left at its default.
  added = _unset(config) - set(comparison.values(before))
  spans = any(each.path == _LENGTH for each in changes)
  refused = [
    each
    for each in changes
    if each.path not in added
    and not each.rule.may_change
    and not (spans and _SCHEDULE in each.path)
  ]
  if refused:
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    raise user_error.UserError(
      f"{folder} holds a run with another configuration:"
      f" {_line(refused[0])}{more}; give the same values, or another"
      " --job_log_dir."
    )
  return [_line(each) for each in changes]


def store(config: fdl.Buildable, folder: epath.Path) -> None:
  """Stores a configuration in place of the one that may be there.

  Args:
    config: The root of the resolved configuration.
    folder: Of the run.
  """
  files.write_text(folder / run_dir.CONFIG_TEXT, dump.to_text(config))
  files.write_text(folder / run_dir.CONFIG_JSON, dump.to_json(config))


def _line(change: comparison.Difference) -> str:
  return f"{change.path} is {change.before} there and {change.after} here"


def _unset(config: fdl.Buildable) -> set[str]:
  """Returns the paths of fields that have their defaults."""
  return {
    tree.join(path, name)
    for path, node in tree.nodes(config)
    for name in tree.field_names(node)
    if not tree.is_set(node, name)
  }
