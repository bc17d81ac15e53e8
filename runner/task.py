"""Tasks: a model, its learner and its metrics.

A task is independent of data, meshes and steps, which belong to the `Job`.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn

from paxon.inputs import tokenizer_protocol
from paxon.layers import contracts
from paxon.learners import learner as learner_lib
from paxon.learners import learner_groups
from paxon.learners import metrics as metrics_lib


@runtime_checkable
class NamedPredictions(Protocol):
  """A function of predictions that are numbers of texts."""

  @property
  def names(self) -> Mapping[str, Any]:
    """The texts by prediction."""
    ...


@runtime_checkable
class DescribedPredictions(Protocol):
  """A function of predictions that need a description."""

  @property
  def description(self) -> Any:
    """A JSON value, stored beside the predictions."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """A model with its learner and metrics.

  Attributes:
    name: Name in summaries and reports.
    model: A linen module that is a `contracts.TrainedModel`. Models that
      generate text are a `contracts.LanguageModel`.
    learner: The optimizer and gradient transformations, or several of some of
      the variables.
    metrics: Functions of a batch and the model's per-example outputs, computed
      in addition to the model's own metrics.
    predictions: Returns the outputs of `--mode=infer` per example, arrays
      [B,...] by name, from a batch and the model's per-example outputs; None
      for the outputs with one value per example. It may be a
      `NamedPredictions` or a `DescribedPredictions`.
    tokenizer: Encodes prompts and decodes generated tokens; without one there
      are no samples.
    exported_config: Fields of the imported `config.json` that an export
      changes, JSON values, for a model of another class, or None.
    reward: `(prompt, answer) -> float`, from texts. With one, the training
      input has prompts, to which the model samples answers
      (`runner.training.rollouts`).
  """

  name: str
  model: nn.Module
  learner: learner_groups.AnyLearner
  metrics: tuple[metrics_lib.MetricFn, ...] = ()
  predictions: (
    Callable[[metrics_lib.Batch, metrics_lib.Outputs], Mapping[str, Any]] | None
  ) = None
  tokenizer: tokenizer_protocol.Tokenizer | None = None
  exported_config: Mapping[str, Any] | None = None
  reward: Callable[[str, str], float] | None = None

  def __post_init__(self) -> None:
    if not self.name:
      raise ValueError("Task.name must not be empty.")
    if not isinstance(self.model, contracts.TrainedModel):
      raise TypeError(
        f"Task.model must have a method `loss`, and"
        f" {type(self.model).__name__} has none."
      )

  @property
  def only_learner(self) -> learner_lib.Learner:
    """The learner; raises TypeError if the task has several."""
    if not isinstance(self.learner, learner_lib.Learner):
      raise TypeError(
        "Task.learner must be a single Learner here, got several."
      )
    return self.learner

  @property
  def generates(self) -> bool:
    """Whether the model can generate tokens."""
    return isinstance(self.model, contracts.LanguageModel)
