r"""Imported Hugging Face models, trained on pairs of answers.

  tools/hf import Qwen3-0.6B --to runs/qwen3 --dtype float32
  tools/python -m paxon.runner.main --job_log_dir=runs/preferred \
      --exp=tasks.lm.params.preferences.HuggingFacePreferences \
      --fdl.weights=runs/qwen3 --fdl.train_files=pairs.jsonl

A line of the file has a `prompt`, a `chosen` and a `rejected` answer, strings
or lists of messages; for KTO a `prompt`, a `completion` and a `label`, true or
false (`inputs.tokenizers.preference_pairs`). The trained run
generates, evaluates and is exported like any run of the model. A reward model
(`HuggingFaceReward`) gives numbers instead: see `tasks.lm.params.model_reward`.
"""

import os
from typing import Any, Literal

from etils import epath
import fiddle as fdl

from paxon.inputs import packing, tokenizer_protocol
from paxon.inputs.sources import python_stdlib
from paxon.inputs.tokenizers import chats, preference_pairs, scored_pairs
from paxon.inputs.tokenizers import load as load_tokenizer
from paxon.layers.losses import preference_losses
from paxon.layers.models import (
  desirability_lm,
  fixed_model,
  preference_lm,
  reward_lm,
)
from paxon.runner import run_dir, user_error
from paxon.runner import task as task_lib
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.settings import training
from paxon.tasks.lm.params import hugging_face

_FROZEN = r"frozen/reference/(.*)"
_LOSSES = {
  "dpo": preference_losses.dpo,
  "ipo": preference_losses.ipo,
  "orpo": preference_losses.orpo,
  "simpo": preference_losses.simpo,
  "kto": preference_losses.kto,
}
# These use no reference.
_ALONE = ("orpo", "simpo")


class _Pairs(hugging_face.HuggingFaceLm):
  """Training of an imported decoder on answers."""

  length = 512
  global_batch_size = 8
  prompts = None
  max_new_tokens = None

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns endless shuffled training pairs and one validation epoch."""
    too_long = chats.TooLong(self.long_chats or "cut_right")
    splits = {
      split: self._pairs(split, found, too_long)
      for split, found in self._sources().items()
    }
    if "train" not in splits:
      splits["train"] = fdl.Config(
        preference_pairs.UnsetPairs,
        global_batch_size=self.global_batch_size,
        length=2 * self.length,
        knob="train_files",
        example="pairs.jsonl",
        has_labels=self._has_labels(),
      )
    return splits

  def _pairs(
    self, split: str, documents: fdl.Config[Any], too_long: chats.TooLong
  ) -> fdl.Config[Any]:
    shared = {"tokenizer": self.make_tokenizer(), "length": self.length}
    if fdl.get_callable(documents) is python_stdlib.PythonStdlib:
      source = fdl.Config(
        preference_pairs.ContinuationPairs,
        source=documents,
        has_labels=self._has_labels(),
        **shared,
      )
    else:
      if self.weights is None:
        raise user_error.UserError(
          f"{type(self).__name__} requires weights, which have the chat"
          " template."
        )
      files = self._files(split)
      assert files is not None
      of_lines, of_rows, made = (
        preference_pairs.PairLines,
        preference_pairs.PairRows,
        preference_pairs.TokenizedPairs,
      )
      if self._has_labels():
        of_lines, of_rows, made = (
          preference_pairs.LabelledLines,
          preference_pairs.LabelledRows,
          preference_pairs.LabelledAnswers,
        )
      lines = fdl.Config(of_lines, files=files)
      rows = self._table(files, columns=None)
      if rows is not None:
        lines = fdl.Config(of_rows, rows=rows)
      source = fdl.Config(
        made,
        source=lines,
        template=self._chat_template(),
        too_long=too_long,
        trained_turns=self._trained_turns(),
        **shared,
      )
    return self._pack(
      split,
      source,
      packing=packing.Packing.NONE,
      tokenizer=shared["tokenizer"],
      global_batch_size=self.global_batch_size,
      length=2 * self.length,
    )

  def _has_labels(self) -> bool:
    return False


class HuggingFacePreferences(_Pairs):
  """Training of an imported decoder on pairs of answers.

  Attributes:
    preference: The loss: `dpo`, `ipo`, `kto`, `orpo` or `simpo`; see
      `layers.losses.preference_losses`.
    beta: Its beta; None for its default.
    reference: Folder created by `tools/hf import` with the reference of DPO,
      IPO and KTO; None for `weights`.
    reference_log_probs: File created by `tasks.lm.params.reference_log_probs`
      with the log probabilities of the reference, which is then not in memory.
  """

  learning_rate = 1e-6

  preference: Literal["dpo", "ipo", "orpo", "simpo", "kto"] = "dpo"
  beta: float | None = None
  reference: str | None = None
  reference_log_probs: str | None = None

  path_knobs = (
    *hugging_face.HuggingFaceLm.path_knobs,
    "reference",
    "reference_log_probs",
  )

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the policy with its reference."""
    task = super().task()
    loss = fdl.Partial(_LOSSES[self.preference])
    made = preference_lm.PreferenceLm
    if self._has_labels():
      made = desirability_lm.DesirabilityLm
    model = fdl.Config(made, policy=task.model)
    if self.beta is not None:
      loss.beta = self.beta
      model.beta = self.beta
    model.preference = loss
    if self._has_reference() and self.reference_log_probs is None:
      # Other objects than the policy's, so that nothing is shared.
      model.reference = fdl.Config(
        fixed_model.FixedModel, model=super().task().model
      )
    self._check_reference()
    task.model = model
    # Bits per byte are those of text.
    task.metrics = ()
    return task

  def run_files(self) -> dict[str, str]:
    """Returns the files of the policy and of its reference."""
    found, reference = super().run_files(), self.reference
    if reference is None:
      return found
    folder = hugging_face.FOLDER
    return {**found, f"reference/{folder}": f"{reference}/{folder}"}

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns the imported checkpoint of each model."""
    start = super().warm_start()
    if start is None or not self._has_reference():
      return start
    if self.reference_log_probs is not None:
      return start
    source = (_FROZEN, r"params/\1")
    if self.reference is None:
      start.patterns = (source,)
    else:
      start.others = (
        fdl.Config(
          training.WarmStart,
          checkpoint=self.reference,
          cast=True,
          patterns=(source,),
        ),
      )
    return start

  def _pairs(
    self, split: str, documents: fdl.Config[Any], too_long: chats.TooLong
  ) -> fdl.Config[Any]:
    found, file = super()._pairs(split, documents, too_long), None
    if self.reference_log_probs is not None:
      file = run_dir.resolve(self.reference_log_probs, os.environ)
    if file is None or self.weights is None or not self._has_reference():
      return found
    folder = run_dir.resolve(self.reference or self.weights, os.environ)
    stored = stored_checkpoint.find_checkpoint(folder)
    found.examples.source = fdl.Config(
      scored_pairs.ScoredPairs,
      pairs=found.examples.source,
      file=os.fspath(file),
      split=split,
      reference=stored_checkpoint.fingerprint(stored),
    )
    return found

  def _has_labels(self) -> bool:
    return self.preference == "kto"

  def _has_reference(self) -> bool:
    return self.preference not in _ALONE

  def _check_reference(self) -> None:
    """Checks that the reference is a model of the same kind and vocabulary."""
    if self.reference is None:
      return
    name = type(self).__name__
    if self.weights is None:
      raise user_error.UserError(f"{name}.reference requires weights.")
    own = self._config()[0]
    other = hugging_face.read_config(self.reference, name)[0]
    names = ("vocab_size", "model_type", "hidden_size", "num_hidden_layers")
    for key in names:
      if own.get(key) != other.get(key):
        raise user_error.UserError(
          f"{name}.reference is {self.reference!r}, whose {key} is"
          f" {other.get(key)}, and that of weights is {own.get(key)}; the"
          " reference must be the same model with other weights."
        )
    facts = [_describe(path) for path in (self.weights, self.reference)]
    if None not in facts and facts[0] != facts[1]:
      raise user_error.UserError(
        f"{name}.reference is {self.reference!r}, whose tokenizer has another"
        " vocabulary than that of weights; the same ids would be other text."
      )


class HuggingFaceReward(_Pairs):
  """Training of a reward model on pairs of answers, from a decoder.

  Attributes:
    center: Weight of the squared sum of the rewards of a pair.
  """

  center: float = 0.0

  def shrink(self) -> Any:
    """Returns a toy, which generates nothing, because no head has logits."""
    return super().shrink().replace(max_new_tokens=None)

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the decoder with a head for rewards."""
    task = super().task()
    task.model = fdl.Config(
      reward_lm.RewardLm,
      decoder=task.model,
      reward_head=reward_lm.make_head(fdl.Config),
      center=self.center,
    )
    task.metrics = ()
    return task

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns the imported checkpoint, which has no head for rewards."""
    start = super().warm_start()
    if start is not None:
      start.may_be_missing = (reward_lm.HEAD_PATTERN,)
    return start


def _describe(weights: str) -> Any:
  """Returns the facts of a folder's tokenizer; None without one."""
  folder = run_dir.resolve(weights, os.environ) / epath.Path(
    hugging_face.FOLDER
  )
  try:
    found = load_tokenizer.load(os.fspath(folder))
  except ValueError:
    return None
  return tokenizer_protocol.describe(found)
