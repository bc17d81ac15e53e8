"""Command line for training, evaluation, sampling and planning.

  main --exp=tasks.lm.params.quickstart.PythonStdlibLm --fdl.num_train_steps=100

A usage error prints one line to stderr and exits with status 2. JAX is imported
only after the flags have been checked, so that usage errors are immediate.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import datetime
import gc
import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

import paxon
from paxon.inputs import stores
from paxon.runner import (
  command_line,
  exit_status,
  flag_table,
  interrupts,
  pax_flags,
  run_code,
  user_error,
  xla_flags,
)
from paxon.runner.hosts import (
  compilation_cache,
  process_settings,
  terminal_output,
)
from paxon.runner.monitoring import launch, stages

if TYPE_CHECKING:
  from etils import epath
  import fiddle as fdl

  from paxon.runner import job as job_lib
  from paxon.runner.configuration import overrides as overrides_lib
  from paxon.runner.configuration import resolving
  from paxon.runner.evaluation import weight_conversion
  from paxon.runner.planning import run_mesh

# Objects between two garbage collections, collections of a generation between
# two of the next. Imports and tracing make objects that stay alive; with
# Python's own thresholds, traversing them again and again is a tenth of the
# time to the first step.
_COLLECTIONS = (50_000, 20, 50)
_EXIT_SIGINT = 130  # 128 + SIGINT
_EXIT_SIGPIPE = 141  # 128 + SIGPIPE


def run(
  packages: Sequence[str] = ("paxon.tasks",), argv: Sequence[str] | None = None
) -> NoReturn:
  """Runs the command line and exits the process with its status.

  Args:
    packages: Packages whose experiments `--list` prints and errors suggest.
      `--exp` accepts any importable class.
    argv: Program name and arguments; by default the process's.
  """
  gc.set_threshold(*_COLLECTIONS)
  terminal_output.open_missing()
  interrupts.end_as_first_process()
  try:
    with interrupts.reliable_interrupts():
      status = _run(
        packages,
        list(sys.argv if argv is None else argv),
        is_program=argv is None,
      )
    sys.stdout.flush()
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    status = error.status
  except KeyboardInterrupt:
    status = _EXIT_SIGINT
  except BrokenPipeError:
    if not terminal_output.drop_if_unread():
      raise
    status = _EXIT_SIGPIPE
  except Exception as error:
    status = exit_status.find(error)
    failure = stores.describe(error)
    if failure is not None:
      status = exit_status.ExitStatus.STORE
      print(f"An object store failed: {failure}", file=sys.stderr)
    elif status is exit_status.ExitStatus.MEMORY:
      traceback.print_exc()
    else:
      raise
  interrupts.exit_quietly(status)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
  """A command line whose experiment was resolved.

  Attributes:
    flags: The parsed flags.
    experiment: Import path of the experiment.
    overrides: Overrides of the command line and of the stored run.
    config: The resolved configuration.
    job: The built configuration.
    notes: Remarks to print, one line each.
  """

  flags: command_line.Values
  experiment: str
  overrides: tuple["overrides_lib.Override", ...]
  config: "fdl.Config[job_lib.Job]"
  job: "job_lib.Job"
  notes: tuple[str, ...] = ()


def _run(
  packages: Sequence[str], argv: Sequence[str], *, is_program: bool
) -> int:
  """Parses, resolves, joins the other processes, and runs the mode.

  Args:
    packages: See `run`.
    argv: Program name and arguments.
    is_program: Whether they are those of this process.
  """
  values, overrides, notes = command_line.parse(argv, packages)
  if values.version:
    print(f"paxon {paxon.__version__}")
    return 0
  if (values.job_log_dir or "").strip():
    guard = run_code.allow if values.allow_run_code else run_code.reject
    guard(_resolve_run_dir(values.job_log_dir))
  if values.help:
    command_line.print_help(values.exp, packages)
    return 0
  if values.list:
    command_line.print_list(packages)
    return 0
  command_line.check(values, packages)
  if values.max_restarts or (is_program and _needs_supervisor(values)):
    return _supervise(values)
  xla_flags.clear(os.environ)
  for note in notes:
    print(note)
  if values.mode == flag_table.CHECK_DEVICES:
    if overrides:
      raise user_error.UserError(
        f"--fdl.{overrides[0].path} requires a --mode with an experiment (got"
        f" --mode={values.mode})."
      )
    with _join(values):
      _check_devices(values)
    return 0
  # Other modes print results, such as texts, and nothing before them.
  is_shown = values.mode == "train"
  with (
    stages.heartbeat("reading the experiment")
    if is_shown
    else contextlib.nullcontext()
  ):
    resolved = _resolve(values, overrides, packages)
  if values.mode not in process_settings.MODES:
    return _run_mode(resolved)
  with _join(values):
    from paxon.runner.hosts import joining

    joining.check_folder(values.job_log_dir)
    if values.check_devices:
      _check_devices(values)
    return _run_mode(resolved)


def _join(
  values: command_line.Values,
) -> contextlib.AbstractContextManager[None]:
  """Joins the other processes; returns the context in which all exit."""
  from paxon.runner.hosts import joining

  joining.join(command_line.get_process_settings(values), os.environ)
  return joining.exit_together()


def _check_devices(values: command_line.Values) -> None:
  """Checks the devices of all processes."""
  from paxon.runner.devices import device_check

  device_check.run(
    is_strict=values.check_devices == flag_table.STRICT,
    timeout_seconds=float(values.host_timeout),
  )


def _needs_supervisor(values: command_line.Values) -> bool:
  """Whether this process trains with others, and has no supervisor yet."""
  settings = command_line.get_process_settings(values)
  return (
    values.mode == "train"
    and values.num_processes != 1
    and process_settings.JOINED_FILE not in os.environ
    and (settings.is_given or process_settings.detect(os.environ) is not None)
  )


def _supervise(values: command_line.Values) -> int:
  """Runs this command in a child process and restarts it when it fails."""
  from paxon.runner.hosts import membership as membership_lib
  from paxon.runner.hosts import supervisor

  run_dir = _resolve_run_dir(values.job_log_dir or "")
  membership = None
  if values.min_processes is not None:
    membership = membership_lib.Membership(
      run_dir=run_dir,
      coordinator_address=values.coordinator_address,
      process_id=values.process_id,
      num_processes=values.num_processes,
      min_processes=values.min_processes,
    )
  return supervisor.Supervisor(
    command=supervisor.child_command(sys.orig_argv, "--max_restarts=0"),
    run_dir=run_dir,
    max_restarts=values.max_restarts,
    timeout_seconds=values.host_timeout,
    membership=membership,
  ).run()


def _resolve(
  values: command_line.Values,
  overrides: tuple["overrides_lib.Override", ...],
  packages: Sequence[str],
) -> _Run:
  """Resolves the experiment, with the stored settings of a trained run."""
  from paxon.runner.configuration import resolving

  experiment, overrides, notes = _find_settings(values, overrides, packages)
  resolved = resolving.resolve(experiment, overrides, packages=packages)
  if resolved.experiment.num_epochs is not None:
    from paxon.runner import epochs

    overrides = epochs.fix_num_steps(
      overrides, resolved.experiment, resolved.config
    )
  if {each.path for each in overrides} & {*resolved.experiment.path_knobs}:
    from paxon.runner.session import run_files

    # As the run's later commands will read them, from any directory.
    overrides = run_files.resolve_paths(resolved.experiment, overrides)
    resolved = resolving.resolve(experiment, overrides, packages=packages)
  notes = (*notes, *_keep_trained_ranges(values, resolved, packages))
  job = resolving.build(resolved.config)
  _check_profile(values, job)
  return _Run(
    flags=values,
    experiment=experiment,
    overrides=overrides,
    config=resolved.config,
    job=job,
    notes=(*notes, *_hint_at_mesh(resolved), *resolved.notes),
  )


def _find_settings(
  values: command_line.Values,
  overrides: tuple["overrides_lib.Override", ...],
  packages: Sequence[str],
) -> tuple[str, tuple["overrides_lib.Override", ...], tuple[str, ...]]:
  """Returns the experiment, the overrides, and notes to print.

  A trained run has stored settings, which complete those of the command line.
  """
  experiment = values.exp or ""
  if command_line.reads_settings(values):
    from paxon.runner import run_dir as run_dirs
    from paxon.runner.session import run_files

    writes = None if values.mode in ("train", "serve") else values.mode
    run_dir = run_dirs.check_existing(
      _resolve_run_dir(values.job_log_dir or ""), writes=writes
    )
    if values.continuous:
      run_files.wait_for_run(run_dir)
    stored = run_files.complete_settings(
      values.exp,
      overrides,
      run_dir,
      packages=packages,
      is_training=values.mode == "train",
    )
    return stored.experiment, stored.overrides, stored.notes
  if values.mode == "train" and values.job_log_dir:
    from paxon.runner.session import run_files

    copied, notes = run_files.use_copies(
      experiment,
      overrides,
      _resolve_run_dir(values.job_log_dir),
      given=overrides,
      packages=packages,
    )
    return experiment, copied, notes
  return experiment, overrides, ()


def _check_profile(values: command_line.Values, job: "job_lib.Job") -> None:
  if values.profile_steps is not None:
    try:
      launch.check_window(
        launch.parse_window(values.profile_steps),
        num_train_steps=job.num_train_steps,
      )
    except ValueError as error:
      raise user_error.UserError(str(error)) from error


def _keep_trained_ranges(
  values: command_line.Values,
  resolved: "resolving.Resolved",
  packages: Sequence[str] = (),
) -> tuple[str, ...]:
  """See `weight_conversion.keep_trained_ranges`."""
  quantization = resolved.experiment.quantization or ""
  if not quantization.endswith(":convert") or values.mode != "eval":
    return ()
  from paxon.runner.evaluation import weight_conversion

  return weight_conversion.keep_trained_ranges(
    resolved.config,
    quantization,
    _resolve_run_dir(values.job_log_dir or ""),
    packages=packages,
  )


def _hint_at_mesh(resolved: "resolving.Resolved") -> tuple[str, ...]:
  """Returns a hint for a mesh that is likely written with Pax's axes."""
  experiment = resolved.experiment
  meshes = [
    value
    for base in type(experiment).__mro__
    if isinstance(value := vars(base).get("mesh"), str)
  ]
  hint = pax_flags.hint_at_mesh(experiment.mesh, meshes)
  return () if hint is None else (hint,)


def _run_mode(run: _Run) -> int:
  """Runs the mode in its run directory; returns the exit status."""
  from paxon.runner.configuration import resolving

  mode = run.flags.mode
  if mode == "inspect_input":
    from paxon.runner.training import inspect_input

    with resolving.user_errors(run.config):
      return inspect_input.run(run.job)
  name = run.experiment.rpartition(".")[2]
  run_dir, is_new = _open_run_dir(run.flags, name)
  print(f"job_log_dir: {os.fspath(run_dir)}", flush=True)
  for note in run.notes:
    print(user_error.one_line(note))
  try:
    if run.job.mesh == "auto" and mode != "plan":
      with resolving.user_errors(run.config):
        run = _choose_mesh(run, run_dir)
    elif run.flags.min_processes is not None:
      with resolving.user_errors(run.config):
        run = _fit_mesh(run)
    with resolving.user_errors(run.config):
      return _start(run, run_dir)
  except user_error.UserError:
    if is_new:
      from paxon.runner import run_dir as run_dirs

      run_dirs.remove_empty(run_dir)
    raise
  except OSError as error:
    # Such as a file where a folder must be, for a library that writes there.
    if not str(error.filename or "").startswith(f"{os.fspath(run_dir)}/"):
      raise
    raise user_error.UserError(
      f"{error.filename} cannot be used ({error.strerror})."
    ) from error


def _open_run_dir(
  values: command_line.Values, experiment: str
) -> tuple["epath.Path", bool]:
  """Returns the run directory, and whether it was created."""
  from paxon.runner import run_dir

  if values.job_log_dir is None:
    now = datetime.datetime.now()
    return run_dir.create_new(experiment, os.environ, now=now), True
  path = _resolve_run_dir(values.job_log_dir)
  if values.mode in flag_table.MODES_OF_TRAINED_RUNS:
    writes = None if values.mode == "serve" else values.mode
    return run_dir.check_existing(path, writes=writes), False
  return path, run_dir.create(path)


def _resolve_run_dir(given: str) -> "epath.Path":
  from paxon.runner import run_dir

  try:
    return run_dir.resolve(given, os.environ)
  except user_error.UserError as error:
    raise user_error.UserError(f"--job_log_dir={error}") from error


def _choose_mesh(run: _Run, run_dir: "epath.Path") -> _Run:
  """Chooses a mesh for the devices and builds the job with it."""
  from paxon.runner.planning import run_mesh

  return _use_mesh(
    run,
    run_mesh.choose_for_run(
      run.job,
      experiment=run.experiment,
      overrides=run.overrides,
      run_dir=run_dir,
    ),
  )


def _fit_mesh(run: _Run) -> _Run:
  """Builds the job with a smaller mesh if processes were lost."""
  from paxon.runner.planning import run_mesh

  choice = run_mesh.fit(run.job.mesh)
  return run if choice is None else _use_mesh(run, choice)


def _use_mesh(run: _Run, choice: "run_mesh.Choice") -> _Run:
  from paxon.runner.configuration import resolving

  print(choice.line, flush=True)
  overrides = choice.overrides(run.overrides)
  resolved = resolving.resolve(run.experiment, overrides)
  _keep_trained_ranges(run.flags, resolved)
  return dataclasses.replace(
    run,
    overrides=overrides,
    config=resolved.config,
    job=resolving.build(resolved.config),
  )


def _resolve_trained(
  run: _Run,
) -> "weight_conversion.Trained | None":
  """Returns the job with the adapters that a conversion merges."""
  if not run.job.merges_adapters:
    return None
  from paxon.runner.configuration import resolving, rewrites
  from paxon.runner.evaluation import weight_conversion

  overrides = [each for each in run.overrides if each.path != "quantization"]
  config = resolving.resolve(run.experiment, overrides).config
  return weight_conversion.Trained(
    job=resolving.build(config), adapter=rewrites.find_adapter(config)
  )


def _start(run: _Run, run_dir: "epath.Path") -> int:
  """Runs the mode and returns the exit status."""
  from paxon.runner.session import serving

  mode = run.flags.mode
  serving.check_mode(run.job, mode)
  if mode in process_settings.MODES:
    compilation_cache.enable(os.environ)
  return _MODES[mode](run, run_dir)


def _train(run: _Run, run_dir: "epath.Path") -> int:
  with stages.heartbeat("loading the program"):
    from paxon.runner.session import stop_signals
    from paxon.runner.training import train

  window = run.flags.profile_steps
  result = train.run(
    run.job,
    run.config,
    run_dir,
    overrides=run.overrides,
    allow_changes=command_line.parse_allowed_changes(run.flags),
    launch=launch.Launch(
      profile=None if window is None else launch.parse_window(window),
      profiler_port=run.flags.profiler_port,
      begin=launch.process_begin(),
      liveness_file=run.flags.liveness_file,
      metrics_port=run.flags.metrics_port,
      local_checkpoint_dir=run.flags.local_checkpoint_dir,
      ends_when_hung=True,
    ),
  )
  return stop_signals.find_exit_status(result.stopped_by)


def _evaluate(run: _Run, run_dir: "epath.Path") -> int:
  step = run.flags.checkpoint_step
  if run.flags.eval_file is not None:
    from paxon.runner.evaluation import text_evaluation

    return text_evaluation.run(run.job, run_dir, run.flags.eval_file, step=step)
  from paxon.runner.evaluation import evaluate

  return evaluate.run(
    run.job,
    run_dir,
    continuous=run.flags.continuous,
    step=step,
    trained=_resolve_trained(run),
  )


def _decode(run: _Run, run_dir: "epath.Path") -> int:
  job, flags = run.job, run.flags
  step = flags.checkpoint_step
  if flags.decode_file is not None:
    from paxon.runner.generation import decode_file

    return decode_file.run(
      job,
      run_dir,
      flags.decode_file,
      output=flags.decode_output,
      batch_size=flags.decode_batch_size,
      step=step,
      chat=flags.chat,
    )
  if flags.prompt is None and job.programs:
    from paxon.runner.training import decode_programs

    if decoding := decode_programs.select_decoding(job):
      return decode_programs.decode(decoding, run_dir, step=step)
  from paxon.runner.generation import decode

  return decode.run(job, run_dir, flags.prompt, step=step, chat=flags.chat)


def _infer(run: _Run, run_dir: "epath.Path") -> int:
  from paxon.runner.evaluation import infer

  return infer.run(run.job, run_dir, step=run.flags.checkpoint_step)


def _serve(run: _Run, run_dir: "epath.Path") -> int:
  from paxon.runner.endpoint import serve

  flags = run.flags
  hosts = map(str.strip, flags.serve_allowed_hosts.split(","))
  options = serve.Options(
    host=flags.serve_host,
    port=flags.serve_port,
    slots=flags.serve_slots,
    context=flags.serve_context,
    cache_tokens=flags.serve_cache_tokens,
    allowed_hosts=tuple(filter(None, hosts)),
    api_key=serve.read_api_key(os.environ),
  )
  return serve.run(run.job, run_dir, options, step=flags.checkpoint_step)


def _plan(run: _Run, run_dir: "epath.Path") -> int:
  from paxon.runner.plan import target as targets
  from paxon.runner.planning import plan_program

  return plan_program.run(
    run.job,
    run.config,
    experiment=run.experiment,
    overrides=run.overrides,
    to=targets.parse_all(run.flags.target),
    run_dir=run_dir,
    is_searched=run.flags.plan_search,
    asked=command_line.parse_questions(run.flags),
  )


# Modes that run in a run directory.
_MODES = {
  "train": _train,
  "eval": _evaluate,
  "decode": _decode,
  "infer": _infer,
  "serve": _serve,
  "plan": _plan,
}


if __name__ == "__main__":
  run()
