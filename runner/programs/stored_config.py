"""The configuration of a run, stored in its folder and compared on return."""

from etils import epath
import fiddle as fdl

from paxon.runner import files, run_dir, user_error
from paxon.runner.configuration import dump, tree

# Values that do not change what the steps made so far have computed.
_FREE = (
  "num_train_steps",
  "checkpoint_every_steps",
  "eval_every_steps",
  "summary_every_steps",
  "max_checkpoints",
  "mesh",
  "generation",
  "baselines",
)
# How a stack is computed, not what it computes.
_FREE_FIELDS = ("scan", "remat_policy")
# These too, where the number of steps has changed: a schedule spans a run.
_SCHEDULE = ".schedule."


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
  changes = differences(stored.read_text(), dump.to_text(config))
  before = _values(stored.read_text())
  # A field that a later version has added, left at its default.
  added = {path for path in _unset(config) if path not in before}
  refused = [
    line
    for path, line in changes.items()
    if path not in added and not _is_free(path, changes)
  ]
  if refused:
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    raise user_error.UserError(
      f"{folder} holds a run with another configuration: {refused[0]}{more};"
      " give the same values, or another --job_log_dir."
    )
  return list(changes.values())


def store(config: fdl.Buildable, folder: epath.Path) -> None:
  """Stores a configuration in place of the one that may be there.

  Args:
    config: The root of the resolved configuration.
    folder: Of the run.
  """
  files.write_text(folder / run_dir.CONFIG_TEXT, dump.to_text(config))
  files.write_text(folder / run_dir.CONFIG_JSON, dump.to_json(config))


def differences(old: str, new: str) -> dict[str, str]:
  """Returns what differs between two dumps, by path.

  Args:
    old: What `dump.to_text` wrote.
    new: The same, later.
  """
  before, after = _values(old), _values(new)
  missing = "nothing"
  return {
    path: f"{path} is {before.get(path, missing)} there and"
    f" {after.get(path, missing)} here"
    for path in before | after
    if before.get(path) != after.get(path)
  }


def _is_free(path: str, changes: dict[str, str]) -> bool:
  root = path.partition(".")[0].partition("[")[0]
  field = path.rpartition(".")[2]
  is_of_schedule = "num_train_steps" in changes and _SCHEDULE in path
  return root in _FREE or field in _FREE_FIELDS or is_of_schedule


def _unset(config: fdl.Buildable) -> set[str]:
  """Returns the paths of fields that have their defaults."""
  return {
    tree.join(path, name)
    for path, node in tree.nodes(config)
    for name in tree.field_names(node)
    if not tree.is_set(node, name)
  }


def _values(text: str) -> dict[str, str]:
  values = {}
  for line in text.splitlines():
    path, equals, value = line.partition(" = ")
    if not equals:
      path, _, value = line.partition(": ")
    values[path] = value
  return values
