"""A language model that learns from the distributions of a teacher.

With temperature t, teacher logits z' and student logits z of a token,

  loss = a t^2 KL(softmax(z' / t) || softmax(z / t)) + (1 - a) nll

(Hinton et al. 2015, https://arxiv.org/abs/1503.02531, section 2). The student's
parameters have the names that they have without this model; the teacher's are
`frozen/teacher/...` (`fixed_model`).
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers import cross_entropy, precision
from paxon.layers.models import document_scores, fixed_model, language_model
from paxon.sharding import checks


class DistilledLm(nn.Module):
  """A student, a `DecoderLm`, that is trained with a fixed teacher.

  Evaluation needs no teacher: its loss is the student's alone.

  Attributes:
    student: The trained model.
    teacher: A model with the same vocabulary.
    temperature: Divides both logits.
    teacher_share: Weight of the teacher's term, a above.
  """

  student: nn.Module
  teacher: fixed_model.FixedModel
  temperature: float = 1.0
  teacher_share: float = 0.5

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_positive(self, "temperature")
    checks.check_interval(self, "[0, 1]", "teacher_share")

  def setup(self) -> None:
    """Gives the student's variables the names that they have without this."""
    nn.share_scope(self, self.student)

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss, metrics and outputs of a batch; see `DecoderLm.loss`.

    In training the metrics have `teacher_kl`, in nats and without t^2, and
    outputs have the student's `token_nll`, `token_hits` and `token_weights`.

    Raises:
      ValueError: The vocabularies differ.
    """
    if deterministic and not self.is_initializing():
      return self.student.loss(batch, deterministic=True)
    names = ("inputs", "positions", "segment_ids")
    arrays = [batch[name] for name in names]
    taught = self.teacher(*arrays, method="__call__")
    logits = self.student(*arrays, deterministic=deterministic)
    if taught.shape != logits.shape:
      raise ValueError(
        f"The teacher predicts {taught.shape[-1]} ids and the student"
        f" {logits.shape[-1]}; both must have the same vocabulary."
      )
    terms = cross_entropy.softmax_terms(logits, batch["targets"])
    kl = forward_kl(taught, logits, temperature=self.temperature)
    weights = language_model.token_weights(batch).astype(jnp.float32)
    # Padding may have any targets.
    nll, kl = (jnp.where(weights != 0, x, 0) for x in (terms.nll, kl))
    share = self.teacher_share
    losses = share * self.temperature**2 * kl + (1 - share) * nll
    total = jnp.sum(weights)
    hits = terms.hits.astype(jnp.float32)
    metrics = {
      "log_pplx": (jnp.sum(nll * weights), total),
      "accuracy": (jnp.sum(hits * weights), total),
      "teacher_kl": (jnp.sum(kl * weights), total),
    }
    outputs = {
      "token_nll": jax.lax.stop_gradient(nll),
      "token_hits": hits,
      "token_weights": weights,
    }
    return (jnp.sum(losses * weights), total), metrics, outputs

  def score(
    self, batch: language_model.Batch
  ) -> document_scores.DocumentScores:
    """Returns the student's scores of documents."""
    return self.student.score(batch)

  def prefill(self, *args: Any, **kwargs: Any) -> jax.Array:
    """Calls the student's."""
    return self.student.prefill(*args, **kwargs)

  def decode_step(self, *args: Any, **kwargs: Any) -> jax.Array:
    """Calls the student's."""
    return self.student.decode_step(*args, **kwargs)


def forward_kl(
  teacher: Float[Array, "batch length vocab"],
  student: Float[Array, "batch length vocab"],
  *,
  temperature: float = 1.0,
) -> Float[Array, "batch length"]:
  """Returns KL(teacher || student) of each token, in nats.

  Both are logits, divided by `temperature`. The teacher is not differentiated.
  """
  teacher, student = (
    jax.nn.log_softmax(precision.widened(x) / temperature)
    for x in (jax.lax.stop_gradient(teacher), student)
  )
  # Where the teacher's probability is 0, so is its term.
  terms = jnp.where(jnp.isneginf(teacher), 0, teacher - student)
  return jnp.sum(jnp.exp(teacher) * terms, axis=-1)
