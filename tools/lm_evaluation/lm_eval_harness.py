"""A run as a model of the evaluation harness, and the harness's program."""

from collections.abc import Mapping, Sequence
import json
import os
import sys
from typing import Any, Final

from lm_eval import _cli  # pyrefly: ignore[missing-import]
from lm_eval import utils as harness_utils  # pyrefly: ignore[missing-import]
from lm_eval.api import model as models  # pyrefly: ignore[missing-import]
from lm_eval.api import registry  # pyrefly: ignore[missing-import]
import tqdm  # pyrefly: ignore[missing-import]

from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.hosts import agreement
from paxon.tools.lm_evaluation import lm_eval_model

NAME: Final = "paxon"
_BATCH_SIZE = 16


class RunModel(lm_eval_model.Responses, models.LM):
  """A run as a model of the harness, made from its `--model_args`."""

  def __init__(
    self,
    run: str,
    overrides: Sequence[str] = (),
    max_length: int | None = None,
    batch_size: int | str = _BATCH_SIZE,
    max_batch_size: int | None = None,
    device: str | None = None,
  ) -> None:
    """Restores the run.

    Args:
      run: `RUN` or `RUN@STEP`.
      overrides: Of its settings, `--fdl.NAME=VALUE`.
      max_length: Tokens that the model reads; None for those of the run.
      batch_size: Number of sequences that are computed together.
      max_batch_size: Of the harness, without effect.
      device: Of the harness, without effect; JAX_PLATFORMS chooses devices.

    Raises:
      UserError: See `lm_eval_model.open_run`.
    """
    models.LM.__init__(self)
    # The harness passes a GPU of torch by default.
    del device, max_batch_size
    if not str(batch_size).isdecimal():
      raise user_error.UserError(
        f"--batch_size must be a number, got {batch_size}."
      )
    parsed = [overrides_lib.parse_argument(each) for each in overrides]
    opened = lm_eval_model.open_run(
      run,
      [each for each in parsed if each is not None],
      max_length=max_length,
    )
    lm_eval_model.Responses.__init__(
      self,
      opened.generator,
      max_length=opened.max_length,
      batch_size=int(batch_size),
      make_bar=tqdm.tqdm,
    )
    self._run_dir = opened.run_dir

  @property
  def tokenizer_name(self) -> str:
    """Distinguishes the prompts that the harness stores."""
    return os.fspath(self._run_dir).replace("/", "__")

  def chat_template(self, chat_template: bool | str = False) -> str | None:
    """Returns the source of the chat template."""
    if not chat_template:
      return None
    return getattr(self.generator.settings.chat_template, "source", None)

  def get_model_info(self) -> dict[str, Any]:
    """Returns facts for the results."""
    session = self.generator.session
    return {
      "experiment": session.job.experiment,
      "step": int(self.generator.state.step),
      "model_num_parameters": session.num_parameters(),
      "max_length": self.max_length,
    }


def run(arguments: Mapping[str, Any], options: Sequence[str]) -> None:
  """Runs `lm-eval run`, on process 0; the others compute its answers.

  Args:
    arguments: Arguments of `RunModel`.
    options: Options of the program.
  """
  if not agreement.is_first():
    RunModel(**arguments).follow()
    return
  made: list[RunModel] = []

  class LeadingModel(RunModel):
    """Is closed at the end."""

    def __init__(self, **kwargs: Any) -> None:
      super().__init__(**kwargs)
      made.append(self)

  registry.model_registry.register(NAME, target=LeadingModel)
  given = {key: value for key, value in arguments.items() if value}
  command = ["lm-eval", "run", f"--model={NAME}"]
  if not any(each.split("=")[0] in ("-C", "--config") for each in options):
    command.append(f"--batch_size={_BATCH_SIZE}")
  # The harness reads them from there.
  before, sys.argv = (
    sys.argv,
    [*command, "--model_args", json.dumps(given), *options],
  )
  try:
    harness_utils.setup_logging()
    program = _cli.HarnessCLI()
    program.execute(program.parse_args())
    for each in made:
      each.close()
  finally:
    sys.argv = before
