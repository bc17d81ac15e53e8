r"""Imported Hugging Face models as students of larger ones.

  tools/python -m paxon.runner.main --job_log_dir=runs/student \
      --exp=tasks.lm.params.distillation.HuggingFaceStudent \
      --fdl.weights=runs/small --fdl.teacher=runs/large \
      --fdl.train_files=text.jsonl

The trained run generates, evaluates and is exported like any run of the small
model.
"""

from typing import Any

import fiddle as fdl

from paxon.layers.models import distilled_lm, fixed_model
from paxon.runner import task as task_lib
from paxon.runner import user_error
from paxon.runner.settings import training
from paxon.tasks.lm.params import hugging_face

_VOCABULARY = "vocab_size"


class HuggingFaceStudent(hugging_face.HuggingFaceLm):
  """Training of an imported decoder on text and the logits of another.

  Attributes:
    teacher: Folder of a run of the teacher: one that `tools/hf import` has
      created, or one that trained it further. Without it the teacher is a
      randomly initialized model like the student, as a toy.
    temperature_of_loss: Divides the logits of both in the teacher's term.
    teacher_share: Weight of the teacher's term; the rest is that of the text.
  """

  teacher: str | None = None
  temperature_of_loss: float = 1.0
  teacher_share: float = 0.5

  path_knobs = (*hugging_face.HuggingFaceLm.path_knobs, "teacher")

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the student with its teacher."""
    task = super().task()
    task.model = fdl.Config(
      distilled_lm.DistilledLm,
      student=task.model,
      teacher=fdl.Config(fixed_model.FixedModel, model=self._teacher()),
      temperature=self.temperature_of_loss,
      teacher_share=self.teacher_share,
    )
    return task

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns the imported checkpoint of each model."""
    start = super().warm_start()
    if start is None:
      return None
    if self.teacher is None:
      raise user_error.UserError(
        f"{type(self).__name__}.teacher is not set; give the folder of a run."
      )
    start.others = (
      fdl.Config(
        training.WarmStart,
        checkpoint=self.teacher,
        cast=True,
        patterns=((r"frozen/teacher/(.*)", r"params/\1"),),
      ),
    )
    return start

  def shrink(self) -> Any:
    """Returns a toy-sized version without weights."""
    return super().shrink().replace(teacher=None)

  def _teacher(self) -> fdl.Config[Any]:
    if self.teacher is None:
      return self._model()
    name = type(self).__name__
    config, of = hugging_face.read_config(self.teacher, name)
    own = self._config()[0]
    if config.get(_VOCABULARY) != own.get(_VOCABULARY):
      raise user_error.UserError(
        f"{name}.teacher is {self.teacher!r}, whose {_VOCABULARY} is"
        f" {config.get(_VOCABULARY)}, and that of weights is"
        f" {own.get(_VOCABULARY)}; both must have the same vocabulary."
      )
    return of.model(config, fdl.Config)
