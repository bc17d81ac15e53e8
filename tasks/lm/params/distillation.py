r"""Imported Hugging Face models as students of larger ones.

  tools/python -m paxon.runner.main --job_log_dir=runs/student \
      --exp=tasks.lm.params.distillation.HuggingFaceStudent \
      --fdl.weights=runs/small --fdl.teacher=runs/large \
      --fdl.train_files=text.jsonl

The trained run generates, evaluates and is exported like any run of the small
model.
"""

import os
from typing import Any

import fiddle as fdl

from paxon.inputs import teacher_input
from paxon.layers import linear
from paxon.layers.models import distilled_lm, fixed_model
from paxon.runner import run_dir, user_error
from paxon.runner import task as task_lib
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.settings import training
from paxon.tasks.lm.params import hugging_face

_VOCABULARY = "vocab_size"
_WIDTH = "hidden_size"


class HuggingFaceStudent(hugging_face.HuggingFaceLm):
  """Training of an imported decoder on text and the logits of another.

  Attributes:
    teacher: Folder of a run of the teacher: one that `tools/hf import` has
      created, or one that trained it further. Without it the teacher is a
      randomly initialized model like the student, as a toy.
    temperature_of_loss: Divides the logits of both in the teacher's term.
    teacher_share: Weight of the teacher's term; the rest is that of the text.
    teacher_log_probs: Folder created by `tasks.lm.params.teacher_log_probs`
      with predictions of the teacher, which is then not in memory.
    hidden_weight: Weight of the mean of squares between the hidden states of
      both, of which the student's are projected to the teacher's width.
  """

  teacher: str | None = None
  temperature_of_loss: float = 1.0
  teacher_share: float = 0.5
  teacher_log_probs: str | None = None
  hidden_weight: float = 0.0

  path_knobs = (
    *hugging_face.HuggingFaceLm.path_knobs,
    "teacher",
    "teacher_log_probs",
  )

  def datasets(self) -> dict[str, fdl.Config]:
    """Adds teacher predictions to training batches."""
    splits = super().datasets()
    if self.teacher_log_probs is None or self.weights is None:
      return splits
    folder = run_dir.resolve(self._teacher_folder(), os.environ)
    stored = stored_checkpoint.find_checkpoint(folder)
    text = splits["train"]
    splits["train"] = fdl.Config(
      teacher_input.TeacherInput,
      text=text,
      folder=os.fspath(run_dir.resolve(self.teacher_log_probs, os.environ)),
      teacher=stored_checkpoint.fingerprint(stored),
      temperature=self.temperature_of_loss,
      global_batch_size=text.global_batch_size,
      length=text.length,
    )
    return splits

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the student with its teacher."""
    task = super().task()
    # Read without weights too, so that its vocabulary is checked.
    teacher, width = self._teacher()
    task.model = fdl.Config(
      distilled_lm.DistilledLm,
      student=task.model,
      temperature=self.temperature_of_loss,
      teacher_share=self.teacher_share,
      hidden_weight=self.hidden_weight,
    )
    if self.teacher_log_probs is None:
      task.model.teacher = fdl.Config(fixed_model.FixedModel, model=teacher)
    if self.hidden_weight:
      task.model.hidden_projection = fdl.Config(
        linear.Linear,
        output_dim=width,
        use_bias=False,
        kernel_axes=("embed", None),
      )
    return task

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns the imported checkpoint of each model."""
    start = super().warm_start()
    if start is None:
      return None
    folder = self._teacher_folder()
    if self.hidden_weight:
      start.may_be_missing = (distilled_lm.PROJECTION_PATTERN,)
    if self.teacher_log_probs is not None:
      return start
    start.others = (
      fdl.Config(
        training.WarmStart,
        checkpoint=folder,
        cast=True,
        patterns=((r"frozen/teacher/(.*)", r"params/\1"),),
      ),
    )
    return start

  def run_files(self) -> dict[str, str]:
    """Returns the files of both models."""
    found, teacher = super().run_files(), self.teacher
    if teacher is None:
      return found
    folder = hugging_face.FOLDER
    return {**found, f"teacher/{folder}": f"{teacher}/{folder}"}

  def shrink(self) -> Any:
    """Returns a toy-sized version without weights."""
    return super().shrink().replace(teacher=None, teacher_log_probs=None)

  def _teacher_folder(self) -> str:
    if self.teacher is None:
      raise user_error.UserError(
        f"{type(self).__name__}.teacher is not set; give the folder of a run."
      )
    return self.teacher

  def _teacher(self) -> tuple[fdl.Config[Any], int]:
    """Returns the teacher and the width of its hidden states."""
    if self.teacher is None:
      return self._make_model(), self._config()[0][_WIDTH]
    name = type(self).__name__
    config, of = hugging_face.read_config(self.teacher, name)
    own = self._config()[0]
    if config.get(_VOCABULARY) != own.get(_VOCABULARY):
      raise user_error.UserError(
        f"{name}.teacher is {self.teacher!r}, whose {_VOCABULARY} is"
        f" {config.get(_VOCABULARY)}, and that of weights is"
        f" {own.get(_VOCABULARY)}; both must have the same vocabulary."
      )
    return of.model(config, fdl.Config), config[_WIDTH]
