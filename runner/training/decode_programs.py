"""Programs that decode evaluation splits, and `--mode=decode` of programs."""

from collections.abc import Mapping
import contextlib
import dataclasses

from etils import epath

from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.evaluation import example_outputs
from paxon.runner.hosts import agreement
from paxon.runner.monitoring import metrics_file, writers
from paxon.runner.session import prefetch, restore, run_metrics
from paxon.runner.session import session as session_lib
from paxon.runner.training import programs
from paxon.sharding import suggestions


@dataclasses.dataclass(kw_only=True, eq=False)
class DecodeSplit:
  """Generates a text for each example of an evaluation split.

  The metrics are those of texts, such as the predict metrics of a SeqIO task
  or, by task, of a mixture. The job's generation settings draw the texts, of at
  most as many tokens as the targets have; of several samples the most likely
  counts. The examples and their texts are in `decode/STEP-NAME.jsonl`.

  Attributes:
    split: An evaluation split whose input has `text_metrics`.
    every_steps: Interval of steps; None decodes only at the end.
    name: Split of its metrics; `decode_SPLIT` by default.
    seed: Seed of its draws; None for that of the job.
  """

  split: str
  every_steps: int | None = None
  name: str = ""
  seed: int | None = None
  _outputs: example_outputs.ExampleOutputs | None = dataclasses.field(
    default=None, init=False, repr=False
  )

  def __post_init__(self) -> None:
    self.name = self.name or f"decode_{self.split}"

  def check(self, session: session_lib.Session) -> None:
    """Raises UserError if the split has no metrics of texts."""
    splits = session.job.eval_inputs
    if self.split not in splits:
      raise user_error.UserError(
        f"DecodeSplit.split: there is no evaluation split {self.split!r}"
        f"{suggestions.suggest(self.split, splits)}"
      )
    source = splits[self.split]
    if not isinstance(source, example_outputs.HasTextMetrics):
      raise user_error.UserError(
        f"DecodeSplit.split: the input of {self.split!r} has no text_metrics,"
        f" which metrics of generated texts require: {type(source).__name__}."
      )
    if not source.reset_for_eval:
      raise user_error.UserError(
        f"DecodeSplit.split: the input of {self.split!r} must have"
        " reset_for_eval, because it is also read here."
      )
    job = programs.with_seed(session.job, self.seed)
    self._outputs = example_outputs.ExampleOutputs(
      dataclasses.replace(session, job=job),
      source.text_metrics,
      settings=job.generation,
    )
    if not self._outputs.collector.needs_predictions:
      raise user_error.UserError(
        f"DecodeSplit.split: no metric of {self.split!r} requires generated"
        " texts."
      )

  def run(self, context: programs.Context) -> Mapping[str, float]:
    """Generates the texts and writes them; returns the metrics.

    Raises:
      UserError: See `check` and `ExampleOutputs.add`.
    """
    if self._outputs is None:
      self.check(context.session)
    outputs = self._outputs
    assert outputs is not None
    source = context.session.job.eval_inputs[self.split]
    state = session_lib.strip_for_evaluation(context.state)
    outputs.begin()
    source.reset()
    with prefetch.Prefetcher(
      source,
      place=context.session.place,
      limit=source.eval_loop_num_batches,
    ) as batches:
      for batch in batches:
        outputs.add(state, batch.arrays)
    metrics = outputs.metrics()
    if agreement.is_first():
      assert isinstance(outputs.collector, example_outputs.TextMetrics)
      lines = [
        f"{files.to_json(line, ensure_ascii=False)}\n"
        for line in outputs.collector.lines()
      ]
      name = f"{context.step}-{self.name}.jsonl"
      files.write_text(context.run_dir / run_dirs.DECODE / name, "".join(lines))
    return metrics


def select_decoding(job: job_lib.Job) -> job_lib.Job | None:
  """Returns a job with only the programs that decode; None if it has none."""
  kinds = (programs.DecodeFile, DecodeSplit)
  chosen = tuple(x for x in job.programs if isinstance(x, kinds))
  return dataclasses.replace(job, programs=chosen) if chosen else None


def decode(
  job: job_lib.Job, run_dir: epath.Path, *, step: int | None = None
) -> int:
  """Runs the programs of a job with a checkpoint (`--mode=decode`).

  Prints their metrics, and adds them to those of evaluations of checkpoints.

  Args:
    job: Its programs all decode.
    run_dir: The directory of its run.
    step: Step of the checkpoint; None for the newest.

  Raises:
    UserError: There is no such checkpoint, or a program cannot decode.
  """
  splits = [x.split for x in job.programs if isinstance(x, DecodeSplit)]
  with contextlib.closing(job), contextlib.ExitStack() as stack:
    session, state = restore.open_trained(
      job, run_dir, step=step, splits=splits
    )
    writer = metrics_file.CompositeWriter(())
    if agreement.is_first():
      made = writers.make_eval_writer(run_dir)
      writer = stack.enter_context(contextlib.closing(made))
    hook = programs.Programs(session, run_dir, writer=writer)
    step = int(state.step)
    found = hook.run_due(step, state, is_last=True)
  for line in run_metrics.format_results(step, found):
    print(line)
  return 0
