"""Changes of a run between its start and its next process.

A changed path is compared by the hashes of its content, and other settings by
the rules of `configuration.comparison`:

  free, such as the mesh           printed
  moved, an equal content          printed
  needs --allow_changes=NAME,...   an error without; printed, and recorded with
                                   its step in the run directory
  never, such as the model         an error

A name is a knob, a path of the configuration, or one step of a path. A knob
covers the paths that keep the stored values if it is set back.
"""

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import re
from typing import Any

from etils import epath
import fiddle as fdl

from paxon.inputs import base_input, tokenizer_protocol
from paxon.runner import files, run_dir, user_error
from paxon.runner import job as job_lib
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.configuration import (
  comparison,
  dump,
  find_experiment,
  resolving,
  tree,
)
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.session import run_files
from paxon.sharding import suggestions

_LENGTH = "num_train_steps"
# Follows the number of steps, because a schedule spans the run.
_SCHEDULE = re.compile(r".*\bschedule\b.*")
_BATCH = re.compile(r"batch_ramp|train_input\.\w+")
_INPUTS = "inputs"
_TRAIN = "train"
_WARM_START = "warm_start"
_STEP = re.compile(r"[^.\[\]']+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
  """Changes with which a run may resume.

  Attributes:
    lines: To print.
    records: Of the changes that were allowed by name: JSON values.
  """

  lines: tuple[str, ...] = ()
  records: tuple[Mapping[str, str], ...] = ()


def check(
  config: fdl.Buildable,
  folder: epath.Path,
  *,
  job: job_lib.Job,
  given: Sequence[overrides_lib.Override] = (),
  allowed: Collection[str] = (),
) -> Changes:
  """Compares a run that has checkpoints with the job that is to resume it.

  The training data is compared when its position is set.

  Args:
    config: The configuration.
    folder: The run directory.
    job: The configuration, built.
    given: The overrides in `config`.
    allowed: The names of `--allow_changes`.

  Raises:
    UserError: A value differs that may not, or moved data is other data.
  """
  try:
    before = files.read_text(folder / run_dir.CONFIG_TEXT)
  except FileNotFoundError:
    return Changes()
  changes = comparison.differences(before, dump.to_text(config))
  # Fields that the code has gained since, with their defaults.
  added = _defaults(config) - set(comparison.values(before))
  moved = [e for e in changes if _kind(e, job) is comparison.Change.MOVED]
  free, ask, never = [], [], []
  rest = [each for each in changes if each not in moved]
  causes = _find_causes(rest, before, folder, job.experiment, given)
  for each in rest:
    kind = _kind(each, job)
    if (
      kind is comparison.Change.FREE
      or each.path in added
      or _follows_length(each, changes, causes)
    ):
      free.append(each)
    else:
      (never if kind is comparison.Change.NEVER else ask).append(each)
  accepted = [e for e in ask if any(_covers(n, e, causes) for n in allowed)]
  _check_rejected(folder, never, [e for e in ask if e not in accepted], causes)
  _check_names(allowed, config, job)
  _check_moved(moved, job, folder)
  # Copies of the run itself need no line.
  lines = [*_moves(moved, os.fspath(folder))]
  lines += [f"changed: {_line(each)}" for each in free]
  lines += [f"changed, as allowed: {_line(each)}" for each in accepted]
  records = [
    {
      "name": _name(each, causes),
      "path": each.path,
      "before": each.before,
      "after": each.after,
    }
    for each in accepted
  ]
  return Changes(lines=tuple(lines), records=tuple(records))


def record(changes: Changes, folder: epath.Path, *, step: int) -> None:
  """Adds the changes that were allowed by name to the run's file of them.

  A line is a JSON object: the first `step` without the change, the `name` in
  `--allow_changes`, and the `path` with its values `before` and `after`.
  """
  if not changes.records:
    return
  path = folder / run_dir.CHANGES
  lines: list[str] = []
  with contextlib.suppress(FileNotFoundError):
    lines = files.read_text(path).splitlines()
  added = [json.dumps({"step": step, **each}) for each in changes.records]
  # A process that was killed may have recorded them.
  lines += [each for each in added if each not in lines]
  files.write_text(path, "".join(f"{line}\n" for line in lines))


def describe_inputs(job: job_lib.Job, folder: epath.Path) -> dict[str, Any]:
  """Returns hashes of the inputs that no checkpoint has, JSON values.

  These are the tokenizer of each input, what the positions of the evaluation
  inputs depend on, the checkpoints from which the run has started, and the
  sources of the run's copies.
  """
  starts = run_files.read_input_facts(folder).get(_WARM_START)
  if starts is None:
    starts = [_fingerprint(each) for each in _starts(job)]
  sources = {_TRAIN: job.train_input, **job.eval_inputs}
  described = {name: _describe(name, each) for name, each in sources.items()}
  own = f"{os.fspath(folder)}/"
  copies = run_files.read_sources(folder) | {
    name: source
    for name, source in job.run_files.items()
    if not source.startswith(own)
  }
  return {_INPUTS: described, _WARM_START: starts, run_files.COPIES: copies}


def store_inputs(facts: Mapping[str, Any], folder: epath.Path) -> None:
  """Writes the result of `describe_inputs`."""
  text = json.dumps(facts, indent=1)
  files.write_text(folder / run_dir.INPUT_FACTS, f"{text}\n")


def _kind(change: comparison.Difference, job: job_lib.Job) -> comparison.Change:
  """Returns the change of a rule, or a stricter one that this job needs."""
  kind, path = change.rule.change, change.path
  counts_batches = not job.train_input.is_resizable
  # Or privacy was accounted for this size.
  is_fixed = counts_batches or job.task.learner.privacy is not None
  if is_fixed and _BATCH.fullmatch(path) and kind is comparison.Change.ASK:
    return comparison.Change.NEVER
  # Answers that are trained on are sampled by these settings.
  if job.task.reward is not None and _STEP.findall(path)[0] == "generation":
    return comparison.Change.ASK
  return kind


def _find_causes(
  changes: Sequence[comparison.Difference],
  before: str,
  folder: epath.Path,
  experiment: str,
  given: Sequence[overrides_lib.Override],
) -> dict[str, set[str]]:
  """Returns the paths that each changed knob has changed.

  A knob has changed those whose stored values return with its stored value.
  """
  kinds = {each.rule.change for each in changes}
  settings = run_files.read_settings(folder)
  if kinds <= {comparison.Change.FREE, comparison.Change.MOVED}:
    return {}
  if settings is None or settings.experiment != experiment:
    return {}
  stored = {each.path: each for each in settings.overrides}
  now = {each.path: each for each in given}
  knobs = find_experiment.find_experiment(experiment).knobs()
  found = {}
  for name in stored | now:
    if name not in knobs or stored.get(name) == now.get(name):
      continue
    back = [each for each in given if each.path != name]
    back += [stored[name]] if name in stored else []
    try:
      text = dump.to_text(resolving.resolve(experiment, back).config)
    except user_error.UserError:
      continue
    left = {each.path for each in comparison.differences(before, text)}
    found[name] = {each.path for each in changes} - left
  return found


def _follows_length(
  change: comparison.Difference,
  changes: Sequence[comparison.Difference],
  causes: Mapping[str, Collection[str]],
) -> bool:
  """Whether a schedule's field differs because the number of steps does."""
  lengths = [each for each in changes if each.path == _LENGTH]
  if not lengths or not _SCHEDULE.fullmatch(change.path):
    return False
  is_length = (change.before, change.after) == (
    lengths[0].before,
    lengths[0].after,
  )
  return is_length or change.path in causes.get(_LENGTH, ())


def _covers(
  name: str,
  change: comparison.Difference,
  causes: Mapping[str, Collection[str]],
) -> bool:
  return (
    change.path in causes.get(name, ())
    or name in _STEP.findall(change.path)
    or re.match(rf"{re.escape(name)}($|[.\[])", change.path) is not None
  )


def _name(
  change: comparison.Difference, causes: Mapping[str, Collection[str]]
) -> str:
  """Returns the knob that has changed a path, or the path."""
  knobs = [name for name, paths in causes.items() if change.path in paths]
  return knobs[0] if knobs else change.path


def _check_rejected(
  folder: epath.Path,
  never: Sequence[comparison.Difference],
  ask: Sequence[comparison.Difference],
  causes: Mapping[str, Collection[str]],
) -> None:
  rejected = [*never, *ask]
  if not rejected:
    return
  more = f" (and {len(rejected) - 1} more)" if len(rejected) > 1 else ""
  what = (
    f"{os.fspath(folder)} has a run with a different configuration:"
    f" {_line(rejected[0])}{more}"
  )
  if never:
    why = never[0].rule.why
    if _BATCH.fullmatch(never[0].path):
      why = (
        "the position in its data, or its privacy, depends on the batches"
        if never[0].rule.change is comparison.Change.ASK
        else why
      )
    raise user_error.UserError(
      f"{what}; a run never resumes with another one, because {why}. Use the"
      " same value, or start a run in another --job_log_dir from this run's"
      " weights (a warm start)."
    )
  names = ",".join(dict.fromkeys(_name(each, causes) for each in ask))
  raise user_error.UserError(
    f"{what}; use the same values, or change them from the newest checkpoint on"
    f" with --allow_changes={names}"
  )


def _check_names(
  allowed: Iterable[str], config: fdl.Buildable, job: job_lib.Job
) -> None:
  """Raises UserError for a name that no setting has, such as a typo."""
  cls = find_experiment.find_experiment(job.experiment)
  paths = comparison.values(dump.to_text(config))
  steps = {step for path in paths for step in _STEP.findall(path)}
  known = {*cls.knobs(), *steps}
  for name in allowed:
    if name not in known and not any(p.startswith(name) for p in paths):
      raise user_error.UserError(
        f"--allow_changes={name}: {cls.__name__} has no setting"
        f" {name!r}{suggestions.suggest(name, sorted(known))}"
      )


def _check_moved(
  moved: Sequence[comparison.Difference], job: job_lib.Job, folder: epath.Path
) -> None:
  """Compares evaluation data and a warm start whose paths have changed.

  Raises:
    UserError: The content differs.
  """
  facts = run_files.read_input_facts(folder)
  stored = facts.get(_INPUTS)
  stored = stored if isinstance(stored, dict) else {}
  for name, source in {_TRAIN: job.train_input, **job.eval_inputs}.items():
    prefix = "train_input." if name == _TRAIN else f"eval_inputs.{name}."
    changed = [each for each in moved if each.path.startswith(prefix)]
    if not changed or name not in stored:
      continue
    problem = _difference(stored[name], _describe(name, source))
    if problem is not None:
      raise user_error.UserError(
        f"{changed[0].path} has moved from {changed[0].before} to"
        f" {changed[0].after}, which is other data: {problem}. Use the data of"
        " the run, or start a run in another --job_log_dir."
      )
  if not any(each.path.startswith(_WARM_START) for each in moved):
    return
  starts = facts.get(_WARM_START)
  starts = starts if isinstance(starts, list) else []
  for start, was in zip(_starts(job), starts, strict=False):
    place = run_dir.resolve(start.checkpoint, os.environ)
    # Nothing is read from it again, so it need not exist, or is a copy.
    is_own = f"{os.fspath(place)}/".startswith(f"{os.fspath(folder)}/")
    if was is None or is_own or not place.is_dir():
      continue
    if was not in _fingerprints(place):
      raise user_error.UserError(
        f"The run started from a checkpoint with the checksums {was}, and"
        f" {start.checkpoint} has none with these: it is another model. Use the"
        " one of the run, or start a run in another --job_log_dir."
      )


def _describe(name: str, source: base_input.BaseInput) -> dict[str, Any]:
  """Returns hashes of an input's tokenizer, and of its data in evaluation."""
  facts: dict[str, Any] = {}
  tokenizer = source.find_tokenizer()
  if tokenizer is not None:
    facts["tokenizer"] = tokenizer_protocol.describe(tokenizer)
  # Checkpoints have the position in the training data.
  if name != _TRAIN:
    source.reset()
    facts["position"] = source.get_state()
  return json.loads(json.dumps(facts))


def _difference(before: Any, after: Any, path: str = "") -> str | None:
  """Returns the first difference of two JSON values in words, or None."""
  if isinstance(before, dict) and isinstance(after, dict):
    for key in before | after:
      where = f"{path}.{key}".lstrip(".")
      found = _difference(before.get(key), after.get(key), where)
      if found is not None:
        return found
    return None
  return None if before == after else f"{path} was {before} and is now {after}"


def _starts(job: job_lib.Job) -> list[Any]:
  start = job.warm_start
  return [] if start is None else [start, *start.others]


def _fingerprint(start: Any) -> str | None:
  place = run_dir.resolve(start.checkpoint, os.environ)
  try:
    found = stored_checkpoint.find_checkpoint(place, step=start.step)
    return stored_checkpoint.fingerprint(found)
  except user_error.UserError:
    return None


def _fingerprints(place: epath.Path) -> set[str]:
  folder, steps = stored_checkpoint.find_steps(place)
  return {
    stored_checkpoint.fingerprint(stored_checkpoint.read_metadata(folder, step))
    for step in steps
  }


def _moves(moved: Sequence[comparison.Difference], own: str) -> list[str]:
  """Returns a line for each place that is not in another one that moved."""
  pairs: dict[tuple[str, str], None] = {}
  for each in moved:
    for before, after in _places(each):
      if before != after and not f"{after}/".startswith(f"{own}/"):
        pairs[before, after] = None
  return [
    f"moved: {before} is now {after}"
    for before, after in pairs
    if not any(
      before.startswith(f"{old}/")
      and after.startswith(f"{new}/")
      and before[len(old) :] == after[len(new) :]
      for old, new in pairs
    )
  ]


def _places(change: comparison.Difference) -> list[tuple[str, str]]:
  """Returns the old and new paths of a field: text, several or by name."""
  try:
    before, after = map(ast.literal_eval, (change.before, change.after))
  except (ValueError, SyntaxError):
    return [(change.before, change.after)]
  if isinstance(before, dict) and isinstance(after, dict):
    keys = before.keys() & after.keys()
    return [(str(before[key]), str(after[key])) for key in sorted(keys)]
  return [(str(before), str(after))]


def _line(change: comparison.Difference) -> str:
  path, before, after = map(
    run_files.shorten, (change.path, change.before, change.after)
  )
  return f"{path} was {before} and is now {after}"


def _defaults(config: fdl.Buildable) -> set[str]:
  """Returns the paths of fields that have their defaults, set or not."""
  return {
    tree.join(path, name)
    for path, node in tree.nodes(config)
    for name in tree.field_names(node)
    if not tree.is_set(node, name) or _is_default(node, name)
  }


def _is_default(node: fdl.Buildable, name: str) -> bool:
  value, default = tree.get_value(node, name), tree.get_default(node, name)
  # `==` alone would equate True with 1, and float64 with None.
  return type(value) is type(default) and bool(value == default)
