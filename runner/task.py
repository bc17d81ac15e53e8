"""What is trained: a model, how it learns, and how its results are measured.

A task knows nothing of data, meshes or steps; those belong to the `Job` that
runs it.
"""

import dataclasses

from flax import linen as nn

from paxon.inputs import tokenizer_protocol
from paxon.learners import learner as learner_lib
from paxon.learners import metrics as metrics_lib

_MODEL_METHODS = ("loss", "prefill", "decode_step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """A model with its learner and metrics.

  Attributes:
    name: A word for summaries and reports.
    model: A linen module with the method `loss(batch, *, deterministic)`,
      which returns a weighted loss, weighted metrics and per-example outputs.
      Models that generate have `prefill` and `decode_step` too, and those that
      read a prompt as the source of another text have `encode`.
    learner: The optimizer and what is done to gradients before it.
    metrics: Functions of a batch and the model's per-example outputs, evaluated
      beside the model's own metrics.
    tokenizer: Translates prompts to ids and ids to text. `None` for models that
      do not generate text.
  """

  name: str
  model: nn.Module
  learner: learner_lib.Learner
  metrics: tuple[metrics_lib.MetricFn, ...] = ()
  tokenizer: tokenizer_protocol.Tokenizer | None = None

  def __post_init__(self) -> None:
    if not self.name:
      raise ValueError("Task.name must not be empty.")
    if not callable(getattr(self.model, "loss", None)):
      raise TypeError(
        f"Task.model must have a method `loss`, and"
        f" {type(self.model).__name__} has none."
      )

  @property
  def generates(self) -> bool:
    """Whether the model can generate text."""
    return self.tokenizer is not None and all(
      callable(getattr(self.model, method, None)) for method in _MODEL_METHODS
    )
