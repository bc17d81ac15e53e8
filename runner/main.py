"""The command line: trains, evaluates or samples an experiment.

  main --exp=tasks.lm.params.quickstart.PythonStdlibLm --fdl.num_train_steps=100

Only this module knows flags. Wrong use is answered by one line on stderr and
exit status 2. jax and the programs are imported after the flags have been
understood, so that such answers come at once.
"""

from collections.abc import Sequence
import dataclasses
import datetime
import os
import re
import sys
from typing import TYPE_CHECKING, NoReturn

from absl import flags

from paxon.runner import pax_flags, user_error
from paxon.runner.hosts import process_settings, terminal_output
from paxon.runner.monitoring import launch
from paxon.sharding import suggestions

if TYPE_CHECKING:
  from etils import epath
  import fiddle as fdl

  from paxon.runner import job as job_lib
  from paxon.runner.configuration import experiment_index
  from paxon.runner.configuration import overrides as overrides_lib
  from paxon.runner.configuration import resolving as resolving_lib

MODES = ("train", "eval", "decode", "plan", "inspect_input")

# Those that need a run, and know its experiment and settings from its folder.
_OF_A_RUN = ("eval", "decode")

_WRONG_USE = 2
_INTERRUPTED = 130
_UNREAD = 141  # 128 + SIGPIPE
_FDL_HELP = (
  "--fdl.NAME=VALUE sets a knob of the experiment, or a path in its"
  " configuration, such as --fdl.task.learner.max_grad_norm=0.5."
)


def run(
  packages: Sequence[str] = ("paxon.tasks",), argv: Sequence[str] | None = None
) -> NoReturn:
  """Runs the command line and exits the process with its status.

  Args:
    packages: Where `--list` looks for experiments, and where names close to a
      misspelled one are sought. `--exp` itself takes any importable class.
    argv: The program's name and its arguments; by default the process's.
  """
  try:
    status = _run(packages, list(sys.argv if argv is None else argv))
    sys.stdout.flush()
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    status = _WRONG_USE
  except KeyboardInterrupt:
    status = _INTERRUPTED
  except BrokenPipeError:
    if not terminal_output.drop_if_unread():
      raise
    status = _UNREAD
  sys.exit(status)


def make_flags() -> flags.FlagValues:
  """Returns the flags with their help; `--fdl.` is not among them."""
  values = flags.FlagValues()
  flags.DEFINE_string(
    "exp", None, "The experiment, such as tasks.lm.C.", flag_values=values
  )
  flags.DEFINE_string(
    "job_log_dir",
    None,
    "The folder of the run; one that exists is gone on in. Default: a new one"
    " under ./runs.",
    flag_values=values,
  )
  flags.DEFINE_string(
    "mode", "train", f"One of {', '.join(MODES)}.", flag_values=values
  )
  flags.DEFINE_string(
    "prompt",
    None,
    "For --mode=decode: the text to go on; @FILE has one a line.",
    flag_values=values,
  )
  flags.DEFINE_bool(
    "continuous",
    False,
    "For --mode=eval: evaluate each new checkpoint, until the run is finished.",
    flag_values=values,
  )
  flags.DEFINE_string(
    "profile_steps",
    None,
    "For --mode=train: steps to profile, such as 10:13 for 10, 11 and 12.",
    flag_values=values,
  )
  flags.DEFINE_string(
    "target",
    None,
    "For --mode=plan: the hardware, such as cpu:8, h200:64x8, v5e:16x16 or"
    " v4:2x(4x4x4); several with commas.",
    flag_values=values,
  )
  flags.DEFINE_bool(
    "plan_search",
    False,
    "For --mode=plan: explore meshes, remat policies and microbatches, and"
    " print the best in time and memory.",
    flag_values=values,
  )
  _define_process_flags(values)
  flags.DEFINE_bool(
    "list", False, "Print the experiments and exit.", flag_values=values
  )
  flags.DEFINE_bool(
    "help",
    False,
    "Print this, and with --exp that experiment's knobs; and exit.",
    flag_values=values,
  )
  return values


def _define_process_flags(values: flags.FlagValues) -> None:
  """Adds the flags of runs of several processes."""
  flags.DEFINE_string(
    "coordinator_address",
    None,
    "HOST:PORT of process 0, for a run of several processes; SLURM, Open MPI,"
    " Kubernetes and TPU pods say it themselves.",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "num_processes",
    None,
    "How many processes the run has; 1 for this one alone, wherever it runs.",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "process_id",
    None,
    "The number of this process, from 0.",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "host_timeout",
    300,
    "Seconds that a process waits for the others at its start and its end.",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "max_restarts",
    0,
    "For --mode=train: how often a parent starts this process again from the"
    " newest checkpoint when it, or another host's, dies.",
    flag_values=values,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command:
  """A command line that was understood."""

  exp: str | None
  job_log_dir: str | None
  mode: str
  prompt: str | None
  continuous: bool
  profile_steps: str | None
  target: str | None
  plan_search: bool
  coordinator_address: str | None
  num_processes: int | None
  process_id: int | None
  host_timeout: int
  max_restarts: int
  list: bool
  help: bool
  overrides: tuple["overrides_lib.Override", ...]


def _run(packages: Sequence[str], argv: Sequence[str]) -> int:
  command = _parse(argv)
  if command.help:
    return _print_help(command, packages)
  if command.list:
    return _print_list(packages)
  _check(command, packages)
  if command.max_restarts:
    return _supervise(command)
  command, notes = _with_settings_of_run(command, packages)
  from paxon.runner.configuration import resolving

  resolved = resolving.resolve(
    command.exp or "", command.overrides, packages=packages
  )
  job = resolving.build(resolved.config)
  _check_profile(command, num_train_steps=job.num_train_steps)
  notes = (*notes, *resolved.notes)
  if command.mode not in process_settings.MODES:
    return _run_job(command, resolved, job, notes)
  from paxon.runner.hosts import joining

  joining.join(_processes(command), os.environ)
  with joining.exit_together():
    joining.check_folder(command.job_log_dir)
    return _run_job(command, resolved, job, notes)


def _run_job(
  command: _Command,
  resolved: "resolving_lib.Resolved",
  job: "job_lib.Job",
  notes: Sequence[str],
) -> int:
  """Runs the program of the mode in its folder."""
  if command.mode == "inspect_input":
    return _inspect_input(job, resolved.config)
  run_dir, is_new = _run_dir(command, type(resolved.experiment).__name__)
  print(f"job_log_dir: {os.fspath(run_dir)}", flush=True)
  for note in notes:
    print(note)
  try:
    if job.mesh == "auto" and command.mode != "plan":
      command, resolved, job = _with_mesh(command, job, run_dir)
    return _start(command, job, resolved.config, run_dir)
  except Exception as error:
    refusal = _refusal(error, resolved.config)
    if refusal is None:
      raise
    if is_new:
      from paxon.runner import run_dir as run_dirs

      run_dirs.remove_empty(run_dir)
    raise refusal from error


def _with_mesh(
  command: _Command, job: "job_lib.Job", run_dir: "epath.Path"
) -> tuple[_Command, "resolving_lib.Resolved", "job_lib.Job"]:
  """Chooses a mesh for the devices, and builds the job anew with it."""
  from paxon.runner.configuration import resolving
  from paxon.runner.planning import run_mesh

  choice = run_mesh.of(
    job,
    experiment=command.exp or "",
    overrides=command.overrides,
    run_dir=run_dir,
  )
  print(choice.line, flush=True)
  overrides = choice.overrides(command.overrides)
  resolved = resolving.resolve(command.exp or "", overrides)
  command = dataclasses.replace(command, overrides=overrides)
  return command, resolved, resolving.build(resolved.config)


def _inspect_input(
  job: "job_lib.Job", config: "fdl.Config[job_lib.Job]"
) -> int:
  """Prints batches; there is no run, and so no folder."""
  from paxon.runner.training import inspect_input

  try:
    return inspect_input.run(job)
  except Exception as error:
    refusal = _refusal(error, config)
    if refusal is None:
      raise
    raise refusal from error


def _refusal(
  error: Exception, config: "fdl.Config[job_lib.Job]"
) -> user_error.UserError | None:
  """Returns what a program's error means to its user, or None for a bug."""
  if isinstance(error, user_error.UserError):
    return error
  from paxon.runner.configuration import refusals

  message = refusals.of(error, config)
  return None if message is None else user_error.UserError(message)


def _parse(argv: Sequence[str]) -> _Command:
  """Reads the arguments.

  Raises:
    user_error.UserError: One of them is wrong.
  """
  from paxon.runner.configuration import overrides as overrides_lib

  of_pax = pax_flags.answer(argv[1:], list(make_flags()))
  if of_pax is not None:
    raise user_error.UserError(of_pax)
  overrides, rest = [], [argv[0] if argv else "main"]
  for argument in argv[1:]:
    override = overrides_lib.parse_argument(argument)
    if override is not None:
      overrides.append(override)
    else:
      rest.append(argument)
  values = make_flags()
  for argument in rest[1:]:
    # absl's own, which it takes even where nobody defined them.
    if re.match(r"--?(flagfile|undefok)\b", argument):
      raise _unknown_flag(argument.lstrip("-").partition("=")[0], values)
  try:
    positional = values(rest)[1:]
  except flags.UnrecognizedFlagError as error:
    raise _unknown_flag(error.flagname, values) from error
  except flags.Error as error:
    raise user_error.UserError(f"{error} (--help explains.)") from error
  if positional:
    raise user_error.UserError(
      f"There is an argument {positional[0]!r}, but only flags are taken,"
      " written --name=value."
    )
  # Libraries may read absl's own flags, and they find the defaults.
  flags.FLAGS.mark_as_parsed()
  given = values.flag_values_dict()
  return _Command(overrides=tuple(overrides), **given)


def _unknown_flag(name: str, values: flags.FlagValues) -> user_error.UserError:
  close = suggestions.find_closest(name.partition(".")[0], list(values))
  if name.partition(".")[0] in ("fld", "fd", "fdll", "fiddle"):
    what = f"did you mean '--fdl.{name.partition('.')[2] or 'NAME'}'?"
  elif name in ("h", "?"):
    what = "did you mean '--help'?"
  elif close:
    what = f"did you mean '--{close[0]}'?"
  else:
    what = f"a knob or a path is set by --fdl.{name}=VALUE."
  return user_error.UserError(f"There is no flag --{name}; {what}")


def _check(command: _Command, packages: Sequence[str]) -> None:
  """Checks what can be known before an experiment is imported."""
  if command.mode not in MODES:
    raise user_error.UserError(
      f"--mode={command.mode} is no mode"
      f"{suggestions.suggest(command.mode, MODES)}"
    )
  if not command.exp and command.mode not in _OF_A_RUN:
    entries = _entries(packages)
    example = f", such as --exp={_short(entries[0].name)}" if entries else ""
    raise user_error.UserError(
      f"--exp is missing: name an experiment{example}; --list prints them."
    )
  if command.continuous and command.mode != "eval":
    raise user_error.UserError(
      f"--continuous is for --mode=eval, and the mode is {command.mode}."
    )
  _check_profile(command, num_train_steps=None)
  _check_target(command)
  _processes(command).check_command(
    process_settings.detect(os.environ),
    mode=command.mode,
    job_log_dir=command.job_log_dir,
  )
  if command.prompt is not None and command.mode != "decode":
    raise user_error.UserError(
      f"--prompt is for --mode=decode, and the mode is {command.mode}."
    )
  if any("\ud800" <= char <= "\udfff" for char in command.prompt or ""):
    raise user_error.UserError(
      f"--prompt={command.prompt!r} is no UTF-8 text; each \\udcXX is the byte"
      " XX, which belongs to no character."
    )
  if command.mode in _OF_A_RUN and not command.job_log_dir:
    raise user_error.UserError(
      f"--mode={command.mode} needs --job_log_dir, the folder of a trained run."
    )
  if command.mode == "inspect_input" and command.job_log_dir is not None:
    raise user_error.UserError(
      "--job_log_dir is the folder of a run, and --mode=inspect_input makes"
      " none; leave it out."
    )
  if command.job_log_dir is not None and not command.job_log_dir.strip():
    raise user_error.UserError("--job_log_dir is empty; give a folder.")


def _processes(command: _Command) -> process_settings.ProcessSettings:
  return process_settings.ProcessSettings(
    coordinator_address=command.coordinator_address,
    num_processes=command.num_processes,
    process_id=command.process_id,
    timeout_seconds=command.host_timeout,
    max_restarts=command.max_restarts,
  )


def _supervise(command: _Command) -> int:
  """Runs this very command in a child, and again when it dies."""
  from paxon.runner import run_dir
  from paxon.runner.hosts import supervisor

  path = run_dir.resolve(command.job_log_dir or "", os.environ)
  return supervisor.Supervisor(
    command=supervisor.child_command(sys.orig_argv, "--max_restarts=0"),
    run_dir=path,
    max_restarts=command.max_restarts,
    timeout_seconds=command.host_timeout,
  ).run()


def _check_target(command: _Command) -> None:
  """Checks `--target` and `--plan_search`, which are of `--mode=plan`."""
  if command.mode != "plan":
    if command.target is not None:
      raise user_error.UserError(
        f"--target is for --mode=plan, and the mode is {command.mode}."
      )
    if command.plan_search:
      raise user_error.UserError(
        f"--plan_search is for --mode=plan, and the mode is {command.mode}."
      )
    return
  from paxon.runner.plan import target as targets

  if not command.target:
    raise user_error.UserError(
      f"--mode=plan needs --target, the hardware: write {targets.FORMS}."
    )
  try:
    targets.parse_all(command.target)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error


def _check_profile(command: _Command, *, num_train_steps: int | None) -> None:
  """Checks `--profile_steps`, as far as the number of steps is known."""
  if command.profile_steps is None:
    return
  if command.mode != "train":
    raise user_error.UserError(
      f"--profile_steps is for --mode=train, and the mode is {command.mode}."
    )
  try:
    window = launch.parse_window(command.profile_steps)
    if num_train_steps is not None:
      launch.check_window(window, num_train_steps=num_train_steps)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error


def _with_settings_of_run(
  command: _Command, packages: Sequence[str]
) -> tuple[_Command, tuple[str, ...]]:
  """Adds what the run's folder says, for modes that need a trained run."""
  if command.mode not in _OF_A_RUN:
    return command, ()
  from paxon.runner.training import run_files

  folder, _ = _run_dir(command, "")
  if command.continuous:
    run_files.wait_for_run(folder)
  completed = run_files.complete_settings(
    command.exp, command.overrides, folder, packages=packages
  )
  command = dataclasses.replace(
    command, exp=completed.experiment, overrides=completed.overrides
  )
  return command, completed.notes


def _run_dir(command: _Command, experiment: str) -> tuple["epath.Path", bool]:
  """Returns the run's folder, and whether it was made for this run."""
  from paxon.runner import run_dir

  if command.job_log_dir is None:
    now = datetime.datetime.now()
    return run_dir.create_new(experiment, os.environ, now=now), True
  path = run_dir.resolve(command.job_log_dir, os.environ)
  if command.mode not in _OF_A_RUN:
    return path, run_dir.create(path)
  return run_dir.existing(path, writes=command.mode), False


def _start(
  command: _Command,
  job: "job_lib.Job",
  config: "fdl.Config[job_lib.Job]",
  run_dir: "epath.Path",
) -> int:
  """Runs the program of the mode and returns its exit status."""
  from paxon.runner.training import serving

  serving.check_mode(job, command.mode)
  if command.mode == "eval":
    from paxon.runner.training import evaluate

    return evaluate.run(job, run_dir, continuous=command.continuous)
  if command.mode == "decode":
    from paxon.runner.training import decode

    return decode.run(job, run_dir, command.prompt)
  if command.mode == "plan":
    return _plan(command, job, config, run_dir)
  from paxon.runner.training import train

  text = command.profile_steps
  train.run(
    job,
    config,
    run_dir,
    overrides=command.overrides,
    launch=launch.Launch(
      profile=None if text is None else launch.parse_window(text),
      begin=launch.process_begin(),
    ),
  )
  return 0


def _plan(
  command: _Command,
  job: "job_lib.Job",
  config: "fdl.Config[job_lib.Job]",
  run_dir: "epath.Path",
) -> int:
  from paxon.runner.plan import target as targets
  from paxon.runner.planning import plan_program

  return plan_program.run(
    job,
    config,
    experiment=command.exp or "",
    overrides=command.overrides,
    to=targets.parse_all(command.target or ""),
    run_dir=run_dir,
    is_searched=command.plan_search,
  )


def _print_list(packages: Sequence[str]) -> int:
  for entry in _entries(packages):
    name = _short(entry.name)
    print(f"{name}  {entry.summary}" if entry.summary else name)
  return 0


def _entries(packages: Sequence[str]) -> list["experiment_index.Entry"]:
  from paxon.runner.configuration import experiment_index

  try:
    return experiment_index.list_experiments(packages)
  except ImportError as error:
    raise user_error.UserError(
      f"The packages of experiments, {', '.join(packages)}, cannot be listed:"
      f" {error}."
    ) from error


def _print_help(command: _Command, packages: Sequence[str]) -> int:
  print((__doc__ or "").partition("\n\nOnly")[0] + "\n\nFlags:")
  values = make_flags()
  for name in values:
    print(f"  --{name}: {values[name].help}")
  print(f"  {_FDL_HELP}")
  if command.exp:
    _print_knobs(command.exp, packages)
  return 0


def _print_knobs(name: str, packages: Sequence[str]) -> None:
  from paxon.runner.configuration import find_experiment

  cls = find_experiment.find_experiment(name, packages=packages)
  from paxon.runner import knobs
  from paxon.runner.configuration import annotations

  print(f"\nKnobs of {cls.__name__}:")
  for knob in cls.knobs().values():
    default = f" = {knob.default!r}"
    if knob.default is knobs.REQUIRED:
      default = ", must be set"
    elif isinstance(knob.default, property):
      default = ", computed from others"
    kind = annotations.describe(knob.annotation)
    print(f"  --fdl.{knob.name}: {kind}{default}")


def _short(name: str) -> str:
  return name.removeprefix("paxon.")


if __name__ == "__main__":
  run()
