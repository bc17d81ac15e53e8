"""Samples of a run by step: drawn while it trains, and at its end."""

from etils import epath

from paxon.learners import train_state
from paxon.runner import files, user_error
from paxon.runner import run_dir as run_dirs
from paxon.runner.generation import generation_program, samples
from paxon.runner.hosts import agreement
from paxon.runner.monitoring import goodput, metrics_file, sample_file
from paxon.runner.session import run_metrics
from paxon.runner.session import session as session_lib
from paxon.runner.training import hooks


class SampleLog(hooks.Hook):
  """Draws the samples of a job and writes them."""

  cause = goodput.Cause.SAMPLING

  def __init__(
    self,
    session: session_lib.Session,
    run_dir: epath.Path,
    *,
    writer: metrics_file.SummaryWriter,
    resume_step: int,
  ) -> None:
    """Prepares; the program is compiled at its first use.

    Args:
      session: The job on its devices.
      run_dir: The run directory; of several processes the first one writes.
      writer: Where texts are written.
      resume_step: The step from which training resumes, or 0.
    """
    self._session, self._run_dir, self._writer = session, run_dir, writer
    self._resume_step = resume_step
    self.every_steps = session.job.observability.sample_every_steps
    self._file: sample_file.SampleFile | None = None
    self._generator: samples.Generator | None = None

  def run(self, progress: hooks.Progress) -> None:
    """Draws and writes samples."""
    self.draw(progress.step, progress.state)

  def draw(self, step: int, state: train_state.TrainState) -> str:
    """Draws and writes samples, and returns them as text.

    All processes must call it.
    """
    if self._generator is None:
      self._generator = samples.Generator(self._session, state)
    else:
      # Its programs are compiled.
      self._generator.use(state)
    generator = self._generator
    prompts = [generator.encode(each) for each in generator.settings.prompts]
    text = samples.to_text(generator.draw(prompts))
    generator.release()
    if agreement.is_first():
      if self._file is None:
        self._file = sample_file.SampleFile(
          self._run_dir / run_dirs.SAMPLES_BY_STEP,
          resume_step=self._resume_step,
        )
      self._file.add(step, text)
      files.write_text(self._run_dir / run_dirs.SAMPLES, text)
      self._writer.write_text(step, run_metrics.TRAIN, "samples", text)
    return text


def check(session: session_lib.Session) -> None:
  """Raises UserError if samples during training are asked of other models."""
  job = session.job
  every_steps = job.observability.sample_every_steps
  if every_steps is None:
    return
  reason = generation_program.generation_problem(job)
  if reason is None and job.generation is None:
    reason = "its generation settings are missing"
  if reason is not None:
    raise user_error.UserError(
      f"observability.sample_every_steps is {every_steps}, but {job.experiment}"
      f" cannot generate text: {reason}."
    )
