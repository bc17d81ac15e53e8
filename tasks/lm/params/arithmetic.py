r"""Sums of digits: a toy for reinforcement learning with verifiable rewards.

  tools/python -m paxon.runner.main --job_log_dir=runs/sums \
      --exp=tasks.lm.params.arithmetic.ArithmeticLm
  tools/python -m paxon.runner.main --job_log_dir=runs/rewarded \
      --exp=tasks.lm.params.arithmetic.ArithmeticGrpo --fdl.weights=runs/sums

The first is trained on sums of which half are wrong, and so answers; the second
samples answers and is rewarded for right ones.
"""

import dataclasses
from typing import Literal

import fiddle as fdl
import numpy as np

from paxon.inputs import packed_input, packing, prompt_groups
from paxon.inputs.streams import example_stream
from paxon.layers.losses import policy_losses
from paxon.layers.models import fixed_model, policy_lm
from paxon.runner import task as task_lib
from paxon.runner import user_error
from paxon.runner.settings import monitoring, training
from paxon.tasks.lm.params import quickstart

_DIGITS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
  """Texts such as `3+5=8`, each pair of digits `copies` times.

  Attributes:
    copies: Number of texts of a pair.
    wrong: Share of texts whose sum is random.
    seed: Seed of the wrong sums.
  """

  copies: int
  wrong: float
  seed: int = 0

  def __len__(self) -> int:
    return self.copies * _DIGITS**2

  def __getitem__(self, index: int, /) -> bytes:
    """Returns a text."""
    copy, pair = divmod(index, _DIGITS**2)
    a, b = divmod(pair, _DIGITS)
    total = a + b
    if copy < round(self.wrong * self.copies):
      random = np.random.default_rng((self.seed, index))
      total = int(random.integers(2 * _DIGITS - 1))
    return f"{a}+{b}={total}".encode()


@dataclasses.dataclass(frozen=True)
class SumPrompts:
  """Texts such as `3+5=`, one for each pair of digits."""

  def __len__(self) -> int:
    return _DIGITS**2

  def __getitem__(self, index: int, /) -> bytes:
    """Returns a text."""
    a, b = divmod(index, _DIGITS)
    return f"{a}+{b}=".encode()


def reward_sum(prompt: str, answer: str) -> float:
  """Returns 1 if the answer to a prompt such as `3+5=` is right, else 0."""
  a, b = prompt.removesuffix("=").split("+")
  return float(answer == str(int(a) + int(b)))


class ArithmeticLm(quickstart.PythonStdlibLm):
  """0.1 M parameters on sums of digits, of which half are random."""

  num_train_steps = 400
  global_batch_size = 64
  checkpoint_every_steps = None
  eval_every_steps = None
  length = 16
  num_layers = 2
  embed_dim = 64
  mlp_dim = 192
  head_dim = 16
  prompts = ("3+5=", "7+8=")
  max_new_tokens = 4
  temperature = 1.0
  top_k = None

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns an endless stream of shuffled texts."""
    return {
      "train": fdl.Config(
        packed_input.pack_documents,
        source=fdl.Config(Sums, copies=20, wrong=0.5),
        tokenizer=self.make_tokenizer(),
        global_batch_size=self.global_batch_size,
        length=self.length,
        shuffle_seed=self.seed,
      )
    }

  def baselines(self) -> None:
    """Returns no baselines, which are those of source code."""
    return


class ArithmeticGrpo(ArithmeticLm):
  """GRPO of a trained `ArithmeticLm`, rewarded for right sums.

  Attributes:
    weights: Run directory of the `ArithmeticLm`.
    policy_loss: The mean over tokens, see `layers.losses.policy_losses`.
    scaled: Whether advantages are divided by their standard deviation; Dr. GRPO
      does not.
    beta: Weight of the KL divergence from the initial model; 0 stores none.
  """

  num_train_steps = 150
  global_batch_size = 16
  summary_every_steps = 10
  checkpoint_every_steps = 50
  num_samples = 8
  peak_learning_rate = 1e-3
  warmup_steps = 5
  weight_decay = 0.0

  weights: str | None = None
  policy_loss: Literal["grpo", "dapo", "dr_grpo"] = "grpo"
  scaled: bool = True
  beta: float = 0.0

  path_knobs = (*ArithmeticLm.path_knobs, "weights")

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the policy with its reward."""
    task = super().task()
    reference = None
    if self.beta:
      # Another object than the policy's, so that nothing is shared.
      reference = fdl.Config(fixed_model.FixedModel, model=super().task().model)
    task.model = fdl.Config(
      policy_lm.PolicyLm,
      policy=task.model,
      group_size=self._group_size(),
      answer_length=self.max_new_tokens,
      reference=reference,
      beta=self.beta,
      mean=policy_losses.Mean(self.policy_loss),
      scaled=self.scaled,
    )
    task.metrics = ()
    task.reward = reward_sum
    return task

  def warm_start(self) -> fdl.Config[training.WarmStart] | None:
    """Returns the trained model."""
    if self.weights is None:
      return None
    start = fdl.Config(training.WarmStart, checkpoint=self.weights)
    if self.beta:
      start.patterns = ((r"frozen/reference/(.*)", r"params/\1"),)
    return start

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns an endless stream of shuffled prompts."""
    size = self._group_size()
    tokenizer = self.make_tokenizer()
    return {
      "train": fdl.Config(
        packed_input.PackedInput,
        examples=fdl.Config(
          example_stream.Examples,
          source=fdl.Config(
            prompt_groups.PromptGroups,
            source=fdl.Config(SumPrompts),
            tokenizer=tokenizer,
            group_size=size,
            length=self.length,
            answer_length=self.max_new_tokens,
          ),
          shuffle_seed=self.seed,
        ),
        packing=packing.Packing.NONE,
        tokenizer=tokenizer,
        global_batch_size=self.global_batch_size,
        length=size * self.length,
      )
    }

  def shrink(self) -> quickstart.PythonStdlibLm:
    """Returns a toy-sized version."""
    return (
      super()
      .shrink()
      .replace(weights=None, num_samples=2, length=16, max_new_tokens=4)
    )

  def observability(self) -> fdl.Config[monitoring.MonitoringSettings]:
    """Returns a monitoring without spikes of the loss, which says little."""
    found = super().observability()
    found.spikes = None
    return found

  def _group_size(self) -> int:
    if self.temperature != 1:
      raise user_error.UserError(
        f"{type(self).__name__}.temperature must be 1, because answers are"
        f" learned with the probabilities of samples, got {self.temperature}."
      )
    return self.num_samples or 1
