"""Training of a job, from its beginning or from a checkpoint (`--mode=train`).

From a notebook:

  config = MyExperiment().job()
  result = train.run(fdl.build(config), config, epath.Path("runs/first"))
  result.state, result.evaluations[result.step], result.history()
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import itertools
import os

from etils import epath
import fiddle as fdl
import jax

from paxon.learners import train_state
from paxon.runner import exit_status, files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.checkpoints import checkpointer, retention, tiers
from paxon.runner.configuration import dump
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.evaluation import evaluation
from paxon.runner.generation import generation_program
from paxon.runner.hosts import agreement, run_lease
from paxon.runner.monitoring import (
  goodput,
  metrics_file,
  metrics_server,
  report,
  run_status,
  stages,
  writers,
)
from paxon.runner.monitoring import launch as launch_lib
from paxon.runner.monitoring import observer as observer_lib
from paxon.runner.session import (
  example_views,
  prefetch,
  restore,
  run_files,
  run_metrics,
  same_run,
  stop_signals,
)
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.runner.training import (
  histograms,
  hooks,
  non_finite,
  preflight,
  profile_guided,
  replay,
  resume_checks,
  rollouts,
  sample_log,
  stragglers,
  train_loop,
)
from paxon.runner.training import programs as programs_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """The outcome of a training.

  Attributes:
    state: After the last step, on the job's mesh.
    step: The last step.
    evaluations: Results (values by metric by split) by the step of their
      evaluation, also of earlier processes of the run.
    stopped_by: The name of the signal that stopped the training, or `None`.
    ended_early: Why training ended before its last step, or `None`: early
      stopping, or the end of the training input.
    run_dir: The run directory.
  """

  state: train_state.TrainState
  step: int
  evaluations: Mapping[int, run_metrics.Results]
  stopped_by: str | None
  ended_early: str | None
  run_dir: epath.Path

  def history(self) -> list[metrics_file.Record]:
    """Returns all metrics of the run since its first step, from its files."""
    path = self.run_dir / run_dirs.METRICS
    return list(metrics_file.read(path)) if path.exists() else []


def run(
  job: job_lib.Job,
  config: fdl.Buildable,
  run_dir: epath.Path,
  *,
  overrides: Sequence[overrides_lib.Override] = (),
  launch: launch_lib.Launch | None = None,
  allow_changes: Sequence[str] = (),
  more_hooks: Sequence[hooks.Hook] = (),
) -> Result:
  """Trains, evaluates, samples and reports; resumes a run that exists.

  A signal that asks to stop ends it after a step and a checkpoint.

  Args:
    job: The resolved configuration, built.
    config: The same, not built; it is stored with the run.
    run_dir: The run directory, which exists.
    overrides: The command line's assignments in `config`, stored for later
      evaluation and decoding.
    launch: Options of this process only; None for the defaults.
    allow_changes: Names of settings with which a run may resume although later
      steps differ, see `resume_checks`.
    more_hooks: Hooks of your own, called after the others.

  Raises:
    UserError: The run in the directory or the machine does not fit the job, or
      the directory cannot be written to.
  """
  request = _Request(
    job=job,
    config=config,
    run_dir=run_dir,
    overrides=overrides,
    launch=launch or launch_lib.Launch(),
    allow_changes=allow_changes,
    more_hooks=more_hooks,
  )
  try:
    ledger = request.make_ledger()
    with (
      contextlib.closing(job),
      metrics_server.report_status(
        ledger, request.launch, num_train_steps=job.num_train_steps
      ) as status,
    ):
      return _run(request, ledger, status)
  except checkpointer.SaveError as error:
    raise user_error.UserError(str(error)).with_status(
      exit_status.ExitStatus.STORE
    ) from error
  except OSError as error:
    status = exit_status.find(error)
    if status is not exit_status.ExitStatus.STORE:
      raise
    raise user_error.UserError(
      f"{os.fspath(run_dir)} cannot be written to: {error.strerror}."
    ).with_status(status) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
  """The arguments of `run`."""

  job: job_lib.Job
  config: fdl.Buildable
  run_dir: epath.Path
  overrides: Sequence[overrides_lib.Override]
  launch: launch_lib.Launch
  allow_changes: Sequence[str]
  more_hooks: Sequence[hooks.Hook]

  def make_ledger(self) -> goodput.Ledger:
    """Returns the account of the time of this process."""
    path = self.run_dir / run_dirs.GOODPUT if agreement.is_first() else None
    return goodput.Ledger(path, begin=self.launch.begin)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prepared:
  """A job that can run on these devices; nothing is written yet.

  Attributes:
    session: The job on its devices.
    traced: Its training step.
    hooks: The hooks that its settings ask for.
    untrained: Warnings about examples without targets.
  """

  session: session_lib.Session
  traced: jax.stages.Traced
  hooks: list[hooks.Hook]
  untrained: list[str]


def _run(
  request: _Request, ledger: goodput.Ledger, status: run_status.RunStatus
) -> Result:
  job, run_dir = request.job, request.run_dir
  # All checks come first: a job that cannot run leaves no files.
  prepared = _prepare(request)
  with contextlib.ExitStack() as stack:
    lease = run_lease.Lease(run_dir) if agreement.is_first() else None
    # If another training has it, all processes say so.
    agreement.from_first(lambda: lease and lease.take(stack))
    same_run.check_directory(run_dir, lease.id if lease else None)
    agree = None
    if not agreement.is_alone():
      agree = agreement.DelayedMaximum(prepared.session.layout)
    stop = stack.enter_context(stop_signals.StopSignals(agree=agree))
    checkpoints = stack.enter_context(
      tiers.open_tiers(
        run_dir, request.launch.local_checkpoint_dir, retention=job.retention
      )
    )
    state = _restore(request, prepared.session, checkpoints, ledger)
    loop = _make_loop(
      request,
      prepared,
      checkpoints=checkpoints,
      lease=lease,
      ledger=ledger,
      status=status,
      stop=stop,
      step=int(state.step),
      stack=stack,
    )
    state = _run_loop(loop, state)
    # The last checkpoint is complete before anything else can fail.
    with ledger.span(goodput.Cause.CHECKPOINT), stages.heartbeat("saving"):
      checkpoints.wait()
    ledger.rest()
    lines, ended_early = _finish(loop, state, run_dir)
    stop.settle()

  # The writers are closed, so this is printed below the progress bar.
  account = ledger.finish(complete=stop.requested is None)
  if stop.requested is not None:
    lines = []
  lines += [
    f"warning: {line}"
    for line in prefetch.describe_untrained(job.inputs)
    if line not in prepared.untrained
  ]
  lines += preflight.describe_privacy(job, int(state.step))
  lines += [account.line(), _close(job, run_dir, stop, int(state.step))]
  print("\n".join(lines), flush=True)
  return Result(
    state=state,
    step=int(state.step),
    evaluations=loop.log.complete(),
    stopped_by=stop.requested,
    ended_early=ended_early,
    run_dir=run_dir,
  )


def _prepare(request: _Request) -> _Prepared:
  """Checks the job and traces its programs."""
  job = request.job
  _check(job, request.launch)
  folder = request.launch.local_checkpoint_dir
  tiers.check(job, folder, run_dir=request.run_dir)
  same_run.check_settings(
    job, request.config, allow_changes=request.allow_changes
  )
  with stages.heartbeat("preparing the run"):
    session = session_lib.open_session(job)
  sample_log.check(session)
  found = _make_optional_hooks(session, request.run_dir)
  with stages.heartbeat("tracing the programs"):
    traced = preflight.check(session)
  untrained = prefetch.describe_untrained(job.inputs)
  for warning in [*preflight.warnings(session), *untrained]:
    print(f"warning: {warning}")
  print("\n".join(preflight.summary(session, request.run_dir)), flush=True)
  return _Prepared(
    session=session, traced=traced, hooks=found, untrained=untrained
  )


def _restore(
  request: _Request,
  session: session_lib.Session,
  checkpoints: checkpointer.Checkpointer,
  ledger: goodput.Ledger,
) -> train_state.TrainState:
  """Returns the newest state, or the initial one; stores the configuration."""
  job, run_dir = request.job, request.run_dir
  # A run without a checkpoint may still change its configuration.
  is_resumed = agreement.from_first(checkpoints.latest_step) is not None
  changes = resume_checks.Changes()
  if is_resumed:
    run_files.check_tokenizer(job, run_dir)
    changes = resume_checks.check(
      request.config,
      run_dir,
      job=job,
      given=request.overrides,
      allowed=request.allow_changes,
    )
    print("".join(f"{line}\n" for line in changes.lines), end="", flush=True)
  facts = resume_checks.describe_inputs(job, run_dir)
  cause = goodput.Cause.RESTORE if is_resumed else goodput.Cause.STARTUP
  what = "restoring the state" if is_resumed else "making the initial state"
  is_writer = agreement.is_first()
  with ledger.span(cause), stages.heartbeat(what):
    record = run_dir / run_dirs.WARM_START if is_writer else None
    state = restore.restore_or_start(session, checkpoints, record=record)
    step = int(state.step)
  # Stored only once the state is known to fit.
  if is_writer:
    # First, because programs that follow the run use the copies.
    run_files.copy_files(job, run_dir)
    resume_checks.record(changes, run_dir, step=step)
    resume_checks.store_inputs(facts, run_dir)
    run_files.store_settings(job.experiment, request.overrides, run_dir)
    run_files.store_config(request.config, run_dir)
    run_files.store_tokenizer(job, run_dir)
    run_files.clear_finished(run_dir)
    run_files.remove_drafts(run_dir)
  return state


def _make_loop(
  request: _Request,
  prepared: _Prepared,
  *,
  checkpoints: checkpointer.Checkpointer,
  lease: run_lease.Lease | None,
  ledger: goodput.Ledger,
  status: run_status.RunStatus,
  stop: stop_signals.StopSignals,
  step: int,
  stack: contextlib.ExitStack,
) -> train_loop.TrainLoop:
  """Returns the loop from a step; its writers are closed with the stack."""
  job, run_dir, session = request.job, request.run_dir, prepared.session
  # Without what was recorded after `step`, which this process repeats.
  log = _read_evaluations(job, run_dir, until=step)
  checkpoints.rank_by(
    lambda step: retention.metric_value(job.retention, log.at(step) or {})
  )
  writer = stack.enter_context(
    contextlib.closing(_make_writer(request, status, step))
  )
  writer.write_text(step, "train", "config", dump.to_text(request.config))
  observer = stack.enter_context(
    observer_lib.Observer(
      job.observability,
      ledger=ledger,
      run_dir=run_dir,
      launch=request.launch,
      train_input=job.train_input,
      resume_step=step,
    )
  )
  status.is_hanging = observer.is_hanging
  return train_loop.TrainLoop(
    session=session,
    traced=prepared.traced,
    checkpoints=checkpoints,
    writer=writer,
    evaluator=evaluation.Evaluator(session),
    log=log,
    stop=stop,
    observer=observer,
    lease=lease,
    more_savers=tiers.list_savers(checkpoints, job),
    hooks=[
      non_finite.Guard(session),
      *prepared.hooks,
      sample_log.SampleLog(session, run_dir, writer=writer, resume_step=step),
      _make_programs(session, run_dir, writer=writer, until=step),
      *request.more_hooks,
      *stragglers.make(session, observer),
    ],
  )


def _make_writer(
  request: _Request, status: run_status.RunStatus, step: int
) -> metrics_file.SummaryWriter:
  """Returns the writer of metrics; one process writes files."""
  if not agreement.is_first():
    return status
  job, run_dir = request.job, request.run_dir
  return writers.make_train_writer(
    run_dir,
    num_train_steps=job.num_train_steps,
    resume_step=step,
    settings={
      "experiment": job.experiment,
      **{each.path: each.text for each in request.overrides},
    },
    more=[
      *writers.make_services(
        job.observability, run_dir, config=dump.to_nested(request.config)
      ),
      report.ReportFile(run_dir),
      status,
    ],
  )


def _run_loop(
  loop: train_loop.TrainLoop, state: train_state.TrainState
) -> train_state.TrainState:
  """Trains to the last step; rolls back where the job says so."""
  settings = loop.session.job.non_finite
  for count in itertools.count(1):
    try:
      return loop.run(state)
    except non_finite.NonFiniteError as error:
      loop.checkpoints.wait()
      newest = agreement.from_first(loop.checkpoints.latest_step)
      rolls_back = settings.policy is training.NonFinitePolicy.ROLL_BACK
      if not rolls_back or count > settings.limit:
        raise error.with_advice(newest, settings) from None
      print(f"{error}; rolling back", flush=True)
      position = error.position
    # The state is freed before another is restored.
    del state
    state = restore.restore_or_start(loop.session, loop.checkpoints)
    loop.session.job.train_input.set_state(dict(position))
    loop.log.forget_after(int(state.step))
  raise AssertionError


def _check(job: job_lib.Job, launch: launch_lib.Launch) -> None:
  if job.observability.wandb_project is not None:
    writers.check_wandb()
  if job.observability.mlflow_experiment is not None:
    writers.check_mlflow()
  profile_guided.check(job.pgle)
  if job.pgle == profile_guided.AUTO and launch.profile is not None:
    raise user_error.UserError(
      "--profile_steps and pgle='auto' both profile the first steps; use only"
      " one of them."
    )


def _read_evaluations(
  job: job_lib.Job, run_dir: epath.Path, *, until: int
) -> evaluation.EvaluationLog:
  """Returns the recorded evaluations up to a step, the same on each host."""
  path = run_dir / run_dirs.METRICS

  def read() -> list[tuple[int, str, Mapping[str, float]]]:
    records = metrics_file.read(path) if path.exists() else []
    return [
      (record.step, record.split, record.values)
      for record in records
      if record.split in job.eval_inputs
    ]

  return evaluation.EvaluationLog(
    [metrics_file.Record(*fields) for fields in agreement.from_first(read)],
    splits=job.eval_inputs,
    until=until,
  )


def _make_programs(
  session: session_lib.Session,
  run_dir: epath.Path,
  *,
  writer: metrics_file.SummaryWriter,
  until: int,
) -> programs_lib.Programs:
  """Returns the programs of the job, with those that a record shows done."""
  path = run_dir / run_dirs.METRICS
  names = {program.name for program in session.job.programs}

  def read() -> list[tuple[int, str]]:
    records = metrics_file.read(path) if path.exists() else []
    return [
      (record.step, record.split)
      for record in records
      if record.split in names and record.step <= until
    ]

  recorded = agreement.from_first(read) if names else ()
  return programs_lib.Programs(
    session, run_dir, writer=writer, recorded=recorded
  )


def _make_optional_hooks(
  session: session_lib.Session, run_dir: epath.Path
) -> list[hooks.Hook]:
  """Returns the hooks that the job's settings ask for."""
  job, settings = session.job, session.job.observability
  found: list[hooks.Hook] = []
  if job.task.reward is not None:
    found.append(rollouts.Rollouts(session))
  if settings.replay_every_steps is not None:
    found.append(
      replay.Replay(session, every_steps=settings.replay_every_steps)
    )
  if job.pgle is not None:
    found.append(
      profile_guided.ProfileGuide(
        setting=job.pgle,
        folder=run_dir / run_dirs.PGLE,
        platform=session.layout.mesh.devices.flat[0].platform,
      )
    )
  if settings.histogram_every_steps is not None:
    found.append(
      histograms.Histograms(
        session,
        every_steps=settings.histogram_every_steps,
        names=settings.histogram_names,
      )
    )
  return found


def _finish(
  loop: train_loop.TrainLoop,
  state: train_state.TrainState,
  run_dir: epath.Path,
) -> tuple[list[str], str | None]:
  """Evaluates, samples and compares a trained model.

  Returns:
    Lines to print, and why training ended early, if it did.
  """
  job, step = loop.session.job, int(state.step)
  lines: list[str] = []
  ended_early = None
  if step < job.num_train_steps and loop.stop.requested is None:
    rule = loop.reason_to_stop()
    if rule is None:
      ended_early = f"the training input ended after {step} steps"
    else:
      ended_early = f"early stopping at step {step}: {rule}"
    lines.append(ended_early)
  results = loop.log.at(step)
  if results is None:
    results = loop.evaluate(step, state)
  elif not loop.log.is_from_this_process(step):
    # Results of this process were already printed.
    lines += run_metrics.format_results(step, results)
  if results is None or loop.stop.requested is not None:
    return lines, ended_early
  programs = loop.find_hook(programs_lib.Programs)
  with loop.observer.span(programs.cause):
    found = programs.run_due(step, state, is_last=True)
  lines += run_metrics.format_results(
    step, {name: values for name, values in found.items() if values}
  )
  with loop.observer.span(goodput.Cause.SAMPLING):
    views = example_views.make(loop.session, state)
  if views is not None and agreement.is_first():
    files.write_text(run_dir / run_dirs.EXAMPLES, files.to_json(views))
    example_views.write(loop.writer, views)
  reason = generation_program.generation_problem(job)
  if job.generation is not None and reason is not None:
    lines.append(f"no samples: {job.experiment} cannot generate text: {reason}")
  elif job.generation is not None:
    samples = loop.find_hook(sample_log.SampleLog)
    with loop.observer.span(samples.cause):
      text = samples.draw(step, state)
    lines = [text, *lines]
  if job.baselines is not None and agreement.is_first():
    with stages.heartbeat("computing the baselines"):
      baselines = job.baselines()
    lines += _compare(loop.writer, results, baselines)
  return lines, ended_early


def _compare(
  writer: metrics_file.SummaryWriter,
  results: run_metrics.Results,
  baselines: Mapping[str, float],
) -> list[str]:
  """Writes the baselines and returns the comparison with them."""
  for name, value in baselines.items():
    writer.write(
      0, metrics_file.BASELINE_PREFIX + name, {"bits_per_byte": value}
    )
  return list(run_metrics.format_comparison(results, baselines))


def _close(
  job: job_lib.Job,
  run_dir: epath.Path,
  stop: stop_signals.StopSignals,
  step: int,
) -> str:
  """Marks a finished run and writes its report; returns the last line."""
  if stop.requested is not None:
    return (
      f"stopped by {stop.requested} at step {step} of {job.num_train_steps};"
      f" the same command with --job_log_dir={os.fspath(run_dir)} resumes from"
      f" step {step}"
    )
  if agreement.is_first():
    run_files.mark_finished(run_dir, step=step, job=job)
    report.write(run_dir)
  return f"report: {os.fspath(run_dir / run_dirs.REPORT)}"
