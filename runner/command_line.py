"""Parsing and checks of the command line, whose flags are in `flag_table`."""

from collections.abc import Callable, Sequence
import os
import pathlib
import re
import shlex
import textwrap
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from absl import flags

from paxon.runner import flag_table, pax_flags, user_error, xla_flags
from paxon.runner.hosts import process_settings
from paxon.runner.monitoring import launch
from paxon.sharding import suggestions

if TYPE_CHECKING:
  from paxon.runner.configuration import find_experiment
  from paxon.runner.configuration import overrides as overrides_lib
  from paxon.runner.planning import questions


_SERVE_LIMITS = (
  ("serve_port", 0, 65535),
  ("serve_slots", 1, 4096),
  ("serve_context", 2, 2**24),
  ("serve_cache_tokens", 0, 2**31 - 1),
)

# Flags by name, as attributes.
Values: TypeAlias = flags.FlagValues


class Command(NamedTuple):
  """A parsed command line; `notes` are lines on flags of Pax."""

  flags: Values
  overrides: tuple["overrides_lib.Override", ...]
  notes: tuple[str, ...] = ()


def parse(argv: Sequence[str], packages: Sequence[str] = ()) -> Command:
  """Parses the arguments into flags and overrides.

  Args:
    argv: Program name and arguments.
    packages: Packages of experiments, whose knobs errors suggest.

  Raises:
    user_error.UserError: An argument is not valid.
  """
  from paxon.runner.configuration import overrides as overrides_lib

  values = make_flags()
  try:
    arguments, notes = pax_flags.translate(argv[1:], list(values))
    arguments, more = xla_flags.translate(arguments)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  overrides, rest = [], [argv[0] if argv else "main"]
  for argument in arguments:
    override = overrides_lib.parse_argument(argument)
    if override is not None:
      overrides.append(override)
    # absl accepts these two even where they are not defined.
    elif re.match(r"--?(flagfile|undefok)\b", argument):
      raise _unknown_flag(argument.lstrip("-").partition("=")[0], values)
    else:
      rest.append(argument)
  try:
    positional = values(rest)[1:]
  except flags.UnrecognizedFlagError as error:
    name = error.flagname
    knob = _suggest_knob(name, rest[1:], packages)
    raise _unknown_flag(name, values, knob=knob) from error
  except flags.Error as error:
    raise user_error.UserError(f"{error} (See --help.)") from error
  if positional:
    raise user_error.UserError(
      f"Unexpected argument {positional[0]!r}; flags are written --name=value."
    )
  # Libraries may read absl's own flags.
  flags.FLAGS.mark_as_parsed()
  pgle, found = _find_pgle(overrides)
  if values.mode == "train":
    overrides += pgle
    more += found
  return Command(values, tuple(overrides), (*notes, *more))


def _find_pgle(
  overrides: "Sequence[overrides_lib.Override]",
) -> "tuple[list[overrides_lib.Override], list[str]]":
  """Returns overrides for PGLE flags of the environment, and notes."""
  from paxon.runner.configuration import overrides as overrides_lib

  is_given = any(override.path == "pgle" for override in overrides)
  try:
    setting, notes = xla_flags.translate_environment(
      os.environ, is_given=is_given
    )
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  argument = f"--fdl.pgle={setting}" if setting is not None else ""
  override = overrides_lib.parse_argument(argument)
  return [] if override is None else [override], notes


def _suggest_knob(
  name: str, arguments: Sequence[str], packages: Sequence[str]
) -> str | None:
  """Returns the override that an unknown flag stands for, if it is a knob."""
  experiment, value = "", "VALUE"
  for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
    flag, equals, text = argument.lstrip("-").partition("=")
    text = text if equals else following
    if argument.startswith("-") and flag == "exp":
      experiment = text
    elif argument.startswith("-") and flag == name and text[:1] != "-":
      value = text or value
  from paxon.runner.configuration import find_experiment

  try:
    cls = find_experiment.find_experiment(experiment, packages=packages)
  except user_error.UserError:
    return None
  return f"--fdl.{name}={value}" if name in cls.knobs() else None


def _unknown_flag(
  name: str, values: Values, *, knob: str | None = None
) -> user_error.UserError:
  first, _, rest = name.partition(".")
  close = suggestions.find_closest(first, list(values))
  if knob is not None:
    hint = f"it is a knob of the experiment: {shlex.quote(knob)}"
  elif first in ("fld", "fd", "fdll", "fiddle"):
    hint = f"did you mean '--fdl.{rest or 'NAME'}'?"
  elif name in ("h", "?"):
    hint = "did you mean '--help'?"
  elif close:
    hint = f"did you mean '--{close[0]}'?"
  else:
    hint = f"to set a knob or a path, use --fdl.{name}=VALUE."
  return user_error.UserError(f"Unknown flag --{name}; {hint}")


def check(values: Values, packages: Sequence[str]) -> None:
  """Checks the flags before the experiment is imported.

  Raises:
    user_error.UserError: A flag is not valid.
  """
  _check_mode(values, packages)
  _check_trained_run(values)
  _check_decode_file(values)
  try:
    (values.prompt or "").encode()
  except UnicodeEncodeError as error:
    raise user_error.UserError(
      f"--prompt={values.prompt!r} is not valid UTF-8."
    ) from error
  for name, low, high in _SERVE_LIMITS:
    value: int = values[name].value or 0
    if not low <= value <= high:
      raise user_error.UserError(
        f"--{name} must be from {low} to {high}, got {value}."
      )
  _check_processes(values)
  try:
    if values.profile_steps is not None:
      launch.parse_window(values.profile_steps)
    if values.profiler_port is not None:
      launch.check_port(values.profiler_port)
    if values.metrics_port is not None:
      launch.check_port(values.metrics_port, flag="metrics_port")
    if values.mode == "plan":
      from paxon.runner.plan import target as targets

      if not values.target:
        raise ValueError(
          f"--mode=plan requires --target, the hardware: {targets.FORMS}."
        )
      targets.parse_all(values.target)
      parse_questions(values)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error


def _check_processes(values: Values) -> None:
  """Checks the flags that describe the processes, and of their devices."""
  settings = get_process_settings(values)
  cluster = process_settings.detect(os.environ)
  if values.mode == flag_table.CHECK_DEVICES:
    settings.check(cluster)
  else:
    settings.check_command(
      cluster,
      job_log_dir=values.job_log_dir,
      is_supervised=process_settings.JOINED_FILE in os.environ,
    )
  choice, allowed = values.check_devices, flag_table.DEVICE_CHECKS
  if choice is not None and choice not in allowed:
    raise user_error.UserError(
      f"--check_devices={choice} must be {' or '.join(allowed)}."
    )


def _check_mode(values: Values, packages: Sequence[str]) -> None:
  """Checks the mode, the flags that it does not have, and the experiment."""
  mode = values.mode
  if mode not in flag_table.MODES:
    raise user_error.UserError(
      f"Unknown --mode={mode}{suggestions.suggest(mode, flag_table.MODES)}"
    )
  for flag in flag_table.FLAGS:
    if mode not in flag.modes and values[flag.name].value != flag.default:
      raise user_error.UserError(
        f"--{flag.name} requires --mode={' or '.join(flag.modes)} (got"
        f" --mode={mode})."
      )
  if mode == flag_table.CHECK_DEVICES:
    return
  if not values.exp and not reads_settings(values):
    entries = _list_entries(packages)
    example = f", such as --exp={_shorten(entries[0].name)}" if entries else ""
    raise user_error.UserError(
      f"--exp is missing: set an experiment{example}; --list prints all."
    )


def _check_trained_run(values: Values) -> None:
  """Checks the flags that select a run and one of its checkpoints."""
  if values.mode in flag_table.MODES_OF_TRAINED_RUNS and not values.job_log_dir:
    raise user_error.UserError(
      f"--mode={values.mode} requires --job_log_dir, the directory of a trained"
      " run."
    )
  if values.job_log_dir is not None and not values.job_log_dir.strip():
    raise user_error.UserError("--job_log_dir is empty; set a directory.")
  if values.checkpoint_step is not None:
    if values.checkpoint_step < 0:
      raise user_error.UserError(
        f"--checkpoint_step must not be negative, got {values.checkpoint_step}."
      )
    if values.continuous:
      raise user_error.UserError(
        "--continuous evaluates every checkpoint; leave out --checkpoint_step."
      )
  if values.continuous and values.eval_file is not None:
    raise user_error.UserError(
      "--continuous evaluates the splits; leave out --eval_file."
    )
  if values.chat and values.prompt is None and values.decode_file is None:
    raise user_error.UserError("--chat requires --prompt, the message.")


def _check_decode_file(values: Values) -> None:
  if values.decode_file is None:
    for name in ("decode_output", "decode_batch_size"):
      if not values[name].using_default_value:
        raise user_error.UserError(f"--{name} requires --decode_file.")
  elif values.prompt is not None:
    raise user_error.UserError(
      "--prompt and --decode_file must not both be set."
    )
  if values.decode_batch_size < 1:
    raise user_error.UserError(
      f"--decode_batch_size must be positive, got {values.decode_batch_size}."
    )


def reads_settings(values: Values) -> bool:
  """Whether the experiment's settings are read from the run directory."""
  resumes = values.mode == "train" and not values.exp and values.job_log_dir
  return values.mode in flag_table.MODES_OF_TRAINED_RUNS or bool(resumes)


def parse_allowed_changes(values: Values) -> tuple[str, ...]:
  """Returns the names of settings with which a run may resume."""
  names = (name.strip() for name in (values.allow_changes or "").split(","))
  return tuple(name for name in names if name)


def parse_questions(values: Values) -> "questions.Questions":
  """Returns the further flags of plans.

  Raises:
    ValueError: One of them is not valid.
  """
  from paxon.runner.planning import questions

  return questions.parse(
    tokens=values.plan_tokens,
    price=values.plan_price,
    days=values.plan_days,
    batches=values.plan_batches,
    lengths=values.plan_lengths,
    programs=values.plan_programs,
    decode=values.plan_decode,
    is_searched=values.plan_search,
  )


def make_flags() -> Values:
  """Returns the flags of the command line, without `--fdl.`."""
  values = flags.FlagValues()
  for flag in flag_table.FLAGS:
    define: Callable[..., object] = flags.DEFINE_string
    if isinstance(flag.default, bool):
      define = flags.DEFINE_bool
    elif flag.is_number or isinstance(flag.default, int):
      define = flags.DEFINE_integer
    define(flag.name, flag.default, flag.help, flag_values=values)
  return values


def print_list(packages: Sequence[str]) -> None:
  """Prints the experiments of packages, and why some cannot run here."""
  num_devices = _count_devices()
  for entry in _list_entries(packages):
    line = f"{_shorten(entry.name)}  {entry.summary}".rstrip()
    problem = entry.find_problem(num_devices)
    print(f"{line}  [{problem}]" if problem else line)


def _count_devices() -> int:
  """Returns the number of devices of this machine, without starting JAX."""
  for pattern in ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*"):
    if found := list(pathlib.Path("/dev").glob(pattern)):
      return len(found)
  return int(os.environ.get("JAX_NUM_CPU_DEVICES") or 1)


def _list_entries(packages: Sequence[str]) -> list["find_experiment.Entry"]:
  from paxon.runner.configuration import find_experiment

  try:
    return find_experiment.list_experiments(packages)
  except ImportError as error:
    raise user_error.UserError(
      f"Cannot list the experiments of {', '.join(packages)}: {error}."
    ) from error


def print_help(experiment: str | None, packages: Sequence[str]) -> None:
  """Prints all flags, and the knobs of an experiment if one is given."""
  print(
    "Trains, evaluates, samples, serves or plans an experiment.\n\n"
    "  main --exp=tasks.lm.params.quickstart.PythonStdlibLm\n\n"
    "Flags [modes]:"
  )
  for flag in flag_table.FLAGS:
    modes = (
      "" if flag.modes == flag_table.MODES else f" [{', '.join(flag.modes)}]"
    )
    print(f"  --{flag.name}{modes}: {flag.help}")
  print(
    "  --fdl.NAME=VALUE: Set a knob of the experiment, or a path in its"
    " configuration, such as --fdl.task.learner.max_grad_norm=0.5."
  )
  if experiment:
    _print_knobs(experiment, packages)


def _print_knobs(name: str, packages: Sequence[str]) -> None:
  from paxon.runner.configuration import find_experiment

  cls = find_experiment.find_experiment(name, packages=packages)
  from paxon.runner import knobs
  from paxon.runner.configuration import annotations

  print(f"\nKnobs of {cls.__name__}, by the class that declares them:")
  texts = knobs.describe(cls)
  left = dict(cls.knobs())
  for klass in cls.__mro__:
    own = [k for k in left.values() if k.owner == klass.__name__]
    if own:
      summary = (klass.__doc__ or "").partition("\n")[0]
      print(f"\n{klass.__name__}  {summary}".rstrip())
    for knob in own:
      del left[knob.name]
      default = f" = {knob.default!r}"
      if knob.default is knobs.REQUIRED:
        default = " (required)"
      elif isinstance(knob.default, property):
        default = " (computed)"
      kind = annotations.describe(knob.annotation)
      print(f"  --fdl.{knob.name}: {kind}{default}")
      text = texts.get(knob.name, "")
      for line in textwrap.wrap(text, width=74, break_on_hyphens=False):
        print(f"      {line}")


def get_process_settings(
  values: Values,
) -> process_settings.ProcessSettings:
  """Returns the flags that describe the processes of a run."""
  return process_settings.ProcessSettings(
    coordinator_address=values.coordinator_address,
    num_processes=values.num_processes,
    process_id=values.process_id,
    timeout_seconds=values.host_timeout,
    max_restarts=values.max_restarts,
    min_processes=values.min_processes,
  )


def _shorten(name: str) -> str:
  return name.removeprefix("paxon.")
