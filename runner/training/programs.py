"""Programs that run during training, at steps that they choose.

An experiment's `programs()` returns them. All run after the checkpoint and the
evaluation of their step, in order, and once more at the end of training. The
metrics that they return are written like those of evaluation splits.
"""

from collections.abc import Collection, Mapping
import dataclasses
import os

from etils import epath

from paxon.learners import train_state
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.generation import decode_file, samples
from paxon.runner.hosts import agreement
from paxon.runner.monitoring import goodput, metrics_file
from paxon.runner.session import session as session_lib
from paxon.runner.settings import programs as programs_lib
from paxon.runner.training import hooks

# Name of a program, and of the metrics of a single data set.
_DECODE = "decode"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """Context of a program.

  Attributes:
    session: The job on its devices.
    state: The train state; the next step donates it, so it must not be kept.
    step: Its step.
    run_dir: The run directory; of several processes the first one writes.
    is_last: Whether training has ended.
  """

  session: session_lib.Session
  state: train_state.TrainState
  step: int
  run_dir: epath.Path
  is_last: bool


class Programs(hooks.Hook):
  """The programs of a job, and which of them have run."""

  cause = goodput.Cause.EVALUATION

  def __init__(
    self,
    session: session_lib.Session,
    run_dir: epath.Path,
    *,
    writer: metrics_file.SummaryWriter,
    recorded: Collection[tuple[int, str]] = (),
  ) -> None:
    """Prepares.

    Args:
      session: The job on its devices.
      run_dir: The run directory.
      writer: Where metrics are written.
      recorded: Steps and names with metrics of an earlier process.

    Raises:
      UserError: The `check` of a program, if it has one, found a mistake.
    """
    self._session, self._run_dir, self._writer = session, run_dir, writer
    self._done = set(recorded)
    for program in session.job.programs:
      if isinstance(program, programs_lib.CheckedProgram):
        program.check(session)

  def due(
    self, step: int, *, is_last: bool = False
  ) -> list[programs_lib.Program]:
    """Returns the programs that have not run at a step where they should."""
    return [
      program
      for program in self._session.job.programs
      if (step, program.name) not in self._done
      and (
        is_last
        or (program.every_steps is not None and step % program.every_steps == 0)
      )
    ]

  def is_due(self, progress: hooks.Progress) -> bool:
    """Whether any program runs after a step, which is not the last one."""
    return not progress.is_last and bool(self.due(progress.step))

  def start(self, progress: hooks.Progress) -> None:
    """Runs the programs that an earlier process left out."""
    if progress.step and self.is_due(progress):
      self.run(progress)

  def run(self, progress: hooks.Progress) -> None:
    """Runs the programs that are due."""
    self.run_due(progress.step, progress.state)

  def run_due(
    self, step: int, state: train_state.TrainState, *, is_last: bool = False
  ) -> dict[str, dict[str, float]]:
    """Runs the programs that are due; writes and returns metrics by name."""
    found = {}
    for program in self.due(step, is_last=is_last):
      context = Context(
        session=self._session,
        state=state,
        step=step,
        run_dir=self._run_dir,
        is_last=is_last,
      )
      metrics = program.run(context) or {}
      found[program.name] = {k: float(v) for k, v in metrics.items()}
      self._done.add((step, program.name))
      if metrics:
        self._writer.write(step, program.name, found[program.name])
    return found


@dataclasses.dataclass(kw_only=True, eq=False)
class DecodeFile:
  """Continues the prompts of a file, as `--mode=decode --decode_file`.

  The samples are in `decode/STEP-NAME.jsonl` of the run, where the name is that
  of the file, or of the program if it is not "decode". With references the
  metrics are `exact_match` and `f1`.

  Attributes:
    path: JSON lines with prompts.
    every_steps: Interval of steps; None decodes only at the end.
    name: Split of its metrics; unique among the data sets of a job.
    batch_size: Number of prompts that are decoded together.
    seed: Seed of its draws; None for that of the job.
    tf_record: Whether the samples are also in `decode/STEP-NAME.tfrecord`.
  """

  path: str
  every_steps: int | None = None
  name: str = _DECODE
  batch_size: int = 32
  seed: int | None = None
  tf_record: bool = False
  _generator: samples.Generator | None = dataclasses.field(
    default=None, init=False, repr=False
  )

  def check(self, session: session_lib.Session) -> None:
    """Raises UserError if the file cannot be read or continued."""
    decode_file.read_file(with_seed(session.job, self.seed), self.path)

  def run(self, context: Context) -> Mapping[str, float]:
    """Decodes the file.

    Raises:
      UserError: See `decode_file.run`.
    """
    job = with_seed(context.session.job, self.seed)
    file = decode_file.read_file(job, self.path)
    output = None
    if self.name != _DECODE:
      name = f"{context.step}-{self.name}.jsonl"
      output = os.fspath(context.run_dir / run_dirs.DECODE / name)
    writer = decode_file.write(
      file,
      context.run_dir,
      output=output,
      step=context.step,
      seed=job.seed,
      make_generator=lambda: self._prepare(context, file),
      batch_size=self.batch_size,
      tf_record=self.tf_record,
    )
    about = agreement.from_first(writer.read_about)
    mean = about["tokens"] / max(about["samples"], 1)
    scores = {k: about[k] for k in ("exact_match", "f1") if k in about}
    return {"tokens_per_sample": mean, **scores}

  def _prepare(
    self, context: Context, file: decode_file.PromptFile
  ) -> samples.Generator:
    if self._generator is None:
      session = context.session
      # The seed is that of samplers without settings for each prompt.
      job = with_seed(session.job, self.seed)
      job = dataclasses.replace(job, generation=file.settings)
      session = dataclasses.replace(session, job=job)
      self._generator = samples.Generator(session, context.state)
    else:
      # Its programs are compiled.
      self._generator.use(context.state)
    return self._generator


def with_seed(job: job_lib.Job, seed: int | None) -> job_lib.Job:
  """Returns a job with a seed; None is its own."""
  return job if seed is None else dataclasses.replace(job, seed=seed)
