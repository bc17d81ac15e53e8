"""Trains a job to its last step, from the beginning or from a checkpoint."""

from collections.abc import Mapping, Sequence
import contextlib
import errno
import json
import os

from etils import epath
import fiddle as fdl

from paxon.learners import train_state
from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.checkpoints import checkpointer, retention
from paxon.runner.configuration import dump
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.hosts import agreement
from paxon.runner.monitoring import (
  goodput,
  metrics_file,
  report,
  summary_writer,
  writers,
)
from paxon.runner.monitoring import launch as launch_lib
from paxon.runner.monitoring import observer as observer_lib
from paxon.runner.training import (
  evaluation,
  evaluation_log,
  figures,
  finished,
  preflight,
  profile_guided,
  restoring,
  samples,
  stop_signals,
  stored_config,
  stored_settings,
  train_loop,
)
from paxon.runner.training import session as session_lib


def run(
  job: job_lib.Job,
  config: fdl.Buildable,
  run_dir: epath.Path,
  *,
  overrides: Sequence[overrides_lib.Override] = (),
  launch: launch_lib.Launch | None = None,
) -> int:
  """Trains, evaluates, samples and reports; goes on where a run has stopped.

  Args:
    job: The resolved configuration, built.
    config: The same, not built, which is stored with the run.
    run_dir: The run's folder, which exists.
    overrides: The assignments by which the command line made `config`, stored
      too, so that evaluation and decoding need not be told them again.
    launch: What belongs to this start only; None for nothing.

  Returns:
    The exit status: 0, also where a signal asked to stop.

  Raises:
    UserError: The folder's run or the machine does not fit the job.
  """
  try:
    with contextlib.closing(job):
      return _run(
        job, config, run_dir, overrides, launch or launch_lib.Launch()
      )
  except checkpointer.SaveError as error:
    raise user_error.UserError(str(error)) from error
  except OSError as error:
    # The one failure of a machine that is met by its user often enough.
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
      raise
    raise user_error.UserError(
      f"{os.fspath(run_dir)} cannot be written to: {error.strerror}."
    ) from error


def _run(
  job: job_lib.Job,
  config: fdl.Buildable,
  run_dir: epath.Path,
  overrides: Sequence[overrides_lib.Override],
  launch: launch_lib.Launch,
) -> int:
  # Of several processes this one writes files, and all others none.
  writes = agreement.is_first()
  ledger = goodput.Ledger(
    run_dir / run_dirs.GOODPUT if writes else None, begin=launch.begin
  )
  if job.observability.wandb_project is not None:
    writers.check_wandb()
  profile_guided.check(job.pgle)
  if job.pgle == profile_guided.AUTO and launch.profile is not None:
    raise user_error.UserError(
      "--profile_steps and pgle='auto' both profile the first steps, and only"
      " one can; leave one out."
    )
  session = session_lib.open_session(job)
  traced = preflight.check(session)
  for warning in preflight.warnings(session):
    print(f"warning: {warning}")
  # Only what can run leaves anything in the folder.
  with contextlib.ExitStack() as stack:
    agree = None
    if not agreement.is_alone():
      agree = agreement.DelayedMaximum(session.layout)
    stop = stack.enter_context(stop_signals.StopSignals(agree=agree))
    checkpoints = stack.enter_context(
      checkpointer.Checkpointer(
        run_dir / run_dirs.CHECKPOINTS, retention=job.retention
      )
    )
    cause = goodput.Cause.STARTUP
    # A start that failed before its first checkpoint binds nobody.
    if agreement.from_first(checkpoints.latest_step) is not None:
      cause = goodput.Cause.RESTORE
      for change in stored_config.check(config, run_dir):
        print(f"changed: {change}")
    with ledger.span(cause):
      state = restoring.restore_or_start(session, checkpoints)
    if writes:
      stored_settings.store(job.experiment, overrides, run_dir)
      stored_config.store(config, run_dir)
      finished.unmark(run_dir)
    log = _evaluation_log(job, run_dir, until=int(state.step))
    checkpoints.rank_by(
      lambda step: retention.metric_value(job.retention, log.at(step) or {})
    )
    writer: summary_writer.SummaryWriter = summary_writer.CompositeWriter(())
    if writes:
      writer = writers.make_train_writer(
        run_dir,
        num_train_steps=job.num_train_steps,
        resume_step=int(state.step),
        more=_wandb(job, config, run_dir),
      )
    stack.enter_context(contextlib.closing(writer))
    observer = stack.enter_context(
      observer_lib.Observer(
        job.observability,
        ledger=ledger,
        run_dir=run_dir,
        launch=launch,
        train_input=job.train_input,
        resume_step=int(state.step),
      )
    )
    loop = train_loop.TrainLoop(
      session=session,
      traced=traced,
      checkpoints=checkpoints,
      writer=writer,
      evaluator=evaluation.Evaluator(session),
      log=log,
      stop=stop,
      observer=observer,
      guide=_guide(session, run_dir),
    )
    state = loop.run(state)
    with ledger.span(goodput.Cause.CHECKPOINT):
      checkpoints.wait()
    ledger.rest()
    lines = _finish(loop, state, run_dir)
    stop.settle()
  account = ledger.finish(complete=stop.requested is None)
  if stop.requested is not None:
    lines = []
  lines += [account.line(), _close(job, run_dir, stop, int(state.step))]
  # After the writers are closed: below the last state of the progress bar.
  print("\n".join(lines), flush=True)
  return 0


def _guide(
  session: session_lib.Session, run_dir: epath.Path
) -> profile_guided.ProfileGuide | None:
  """Returns what profiles some steps, if the job says so."""
  if session.job.pgle is None:
    return None
  return profile_guided.ProfileGuide(
    setting=session.job.pgle,
    folder=run_dir / run_dirs.PGLE,
    platform=session.layout.mesh.devices.flat[0].platform,
  )


def _close(
  job: job_lib.Job,
  run_dir: epath.Path,
  stop: stop_signals.StopSignals,
  step: int,
) -> str:
  """Leaves a finished run with its report; returns what to print last."""
  if stop.requested is not None:
    return (
      f"stopped by {stop.requested} at step {step} of {job.num_train_steps};"
      f" the same command with --job_log_dir={os.fspath(run_dir)} goes on from"
      " there"
    )
  if agreement.is_first():
    finished.mark(run_dir, step=step, job=job)
    report.write(run_dir)
  return f"report: {os.fspath(run_dir / run_dirs.REPORT)}"


def _wandb(
  job: job_lib.Job, config: fdl.Buildable, run_dir: epath.Path
) -> list[summary_writer.SummaryWriter]:
  """Returns what sends figures to Weights & Biases, from one host."""
  settings = job.observability
  if settings.wandb_project is None:
    return []
  return [
    writers.WandbWriter(
      run_dir,
      project=settings.wandb_project,
      entity=settings.wandb_entity,
      config=json.loads(dump.to_json(config)),
    )
  ]


def _evaluation_log(
  job: job_lib.Job, run_dir: epath.Path, *, until: int
) -> evaluation_log.EvaluationLog:
  """Returns what this run has recorded up to a step."""
  path = run_dir / run_dirs.METRICS

  def read() -> list[tuple[int, str, Mapping[str, float]]]:
    records = metrics_file.read(path) if path.exists() else []
    return [
      (record.step, record.split, record.values)
      for record in records
      if record.split in job.eval_inputs
    ]

  return evaluation_log.EvaluationLog(
    [metrics_file.Record(*fields) for fields in agreement.from_first(read)],
    splits=job.eval_inputs,
    until=until,
  )


def _finish(
  loop: train_loop.TrainLoop, state: train_state.TrainState, run_dir: epath.Path
) -> list[str]:
  """Evaluates, samples and compares a trained model; returns what to print."""
  job, step = loop.session.job, int(state.step)
  lines = []
  if step < job.num_train_steps and loop.stop.requested is None:
    early = loop.early_end()
    lines.append(
      f"the training input ended after {step} steps"
      if early is None
      else f"training ends early, at step {step}: {early}"
    )
  results = loop.log.at(step)
  if results is None:
    results = loop.evaluate(step, state)
  elif not loop.log.is_made_here(step):
    # Those made here were shown as progress.
    lines += figures.lines(step, results)
  if results is None or loop.stop.requested is not None:
    return lines
  if job.generation is not None:
    with loop.observer.span(goodput.Cause.SAMPLING):
      drawn = samples.draw(loop.session, state)
    text = samples.to_text(drawn)
    if agreement.is_first():
      files.write_text(run_dir / run_dirs.SAMPLES, text)
    lines = [text, *lines]
  if job.baselines is not None and agreement.is_first():
    lines += _compare(loop.writer, results, job.baselines())
  return lines


def _compare(
  writer: summary_writer.SummaryWriter,
  results: evaluation_log.Results,
  baselines: Mapping[str, float],
) -> list[str]:
  """Writes the baselines and returns the comparison."""
  for name, value in baselines.items():
    writer.write(
      0, summary_writer.BASELINE_PREFIX + name, {"bits_per_byte": value}
    )
  return list(figures.comparison(results, baselines))
