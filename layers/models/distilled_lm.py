"""A language model that learns from a teacher.

With temperature t, teacher logits z' and student logits z of a token, and
hidden states h' and h, the inputs of the heads,

  loss = a t^2 KL(softmax(z' / t) || softmax(z / t)) + (1 - a) nll
         + b mean((P h - h')^2)

(Hinton et al. 2015, https://arxiv.org/abs/1503.02531, section 2; the last term:
Jiao et al. 2020, https://arxiv.org/abs/1909.10351, equation 8). The student's
parameters have the names that they have without this model; the teacher's are
`frozen/teacher/...` (`fixed_model`).

Without a teacher in memory, batches have the probabilities of its k most likely
tokens (`inputs.teacher_input`), and all others together are one outcome. That
KL is at most the whole one, and equal to it for k = vocab.
"""

from typing import Any, ClassVar, Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision, token_context
from paxon.layers.losses import cross_entropy
from paxon.layers.models import fixed_model, language_model
from paxon.sharding import checks

IDS: Final = "teacher_ids"
LOG_PROBS: Final = "teacher_log_probs"
PROJECTION_PATTERN: Final = "params/hidden_projection/.*"


class DistilledLm(language_model.OtherLoss):
  """A student, a `DecoderLm`, that is trained with a fixed teacher.

  Evaluation needs no teacher: its loss is the student's alone.

  Attributes:
    student: The trained model.
    teacher: A `DecoderLm` with the same vocabulary; None reads what it predicts
      from batches.
    temperature: Divides both logits.
    teacher_share: Weight of the teacher's term, a above.
    hidden_weight: Weight of the term of hidden states, b above.
    hidden_projection: P above, [B,T,D] to the teacher's width, such as
      `linear.Linear`; None for the identity.
  """

  student: nn.Module
  teacher: fixed_model.FixedModel | None = None
  temperature: float = 1.0
  teacher_share: float = 0.5
  hidden_weight: float = 0.0
  hidden_projection: nn.Module | None = None

  trained: ClassVar[str] = "student"

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_positive(self, "temperature")
    checks.check_interval(self, "[0, 1]", "teacher_share")
    checks.check_non_negative(self, "hidden_weight")
    if self.teacher is None and self.hidden_weight:
      raise ValueError(
        "DistilledLm.hidden_weight requires a teacher, whose hidden states are"
        f" computed in training; got {self.hidden_weight} without one."
      )

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss, metrics and outputs of a batch; see `DecoderLm.loss`.

    In training the metrics have `teacher_kl`, in nats and without t^2, and with
    `hidden_weight` `hidden_error`, the mean of squares; outputs have the
    student's `token_nll`, `token_hits` and `token_weights`.

    Args:
      batch: As of `DecoderLm.loss`. Without a teacher also `teacher_ids` int32
        [B,T,K] and `teacher_log_probs` float32 [B,T,K], of the teacher at
        `temperature`.
      deterministic: Disables dropout.

    Raises:
      ValueError: The vocabularies or the widths differ, or there is neither a
        teacher nor what it predicts.
    """
    if deterministic and not self.is_initializing():
      return self.student.loss(batch, deterministic=True)
    x, logits = _apply(self.student, batch, deterministic=deterministic)
    terms = cross_entropy.softmax_terms(logits, batch["targets"])
    weights = language_model.token_weights(batch).astype(jnp.float32)
    error = jnp.zeros_like(weights)
    if self.teacher is not None:
      states, taught = self.teacher(batch, method=_apply)
      if taught.shape != logits.shape:
        raise ValueError(
          f"The teacher predicts {taught.shape[-1]} ids and the student"
          f" {logits.shape[-1]}; both must have the same vocabulary."
        )
      kl = forward_kl(taught, logits, temperature=self.temperature)
      if self.hidden_weight:
        error = self._hidden_error(x, states)
    elif LOG_PROBS in batch:
      kl = top_kl(
        batch[IDS], batch[LOG_PROBS], logits, temperature=self.temperature
      )
    elif self.is_initializing():
      kl = jnp.zeros_like(weights)
    else:
      raise ValueError(
        f"DistilledLm has no teacher, and the batch no {LOG_PROBS!r}."
      )
    # Padding may have any targets.
    nll, kl, error = (
      jnp.where(weights != 0, x, 0) for x in (terms.nll, kl, error)
    )
    share = self.teacher_share
    losses = share * self.temperature**2 * kl + (1 - share) * nll
    losses += self.hidden_weight * error
    total = jnp.sum(weights)
    hits = terms.hits.astype(jnp.float32)
    metrics = {
      "log_pplx": (jnp.sum(nll * weights), total),
      "accuracy": (jnp.sum(hits * weights), total),
      "teacher_kl": (jnp.sum(kl * weights), total),
    }
    if self.hidden_weight:
      metrics["hidden_error"] = (jnp.sum(error * weights), total)
    outputs = {
      "token_nll": jax.lax.stop_gradient(nll),
      "token_hits": hits,
      "token_weights": weights,
    }
    return (jnp.sum(losses * weights), total), metrics, outputs

  def _hidden_error(self, x: jax.Array, states: jax.Array) -> jax.Array:
    if self.hidden_projection is not None:
      x = self.hidden_projection(x)
    if x.shape != states.shape:
      raise ValueError(
        f"The student's hidden states have {x.shape[-1]} entries and the"
        f" teacher's {states.shape[-1]}; set hidden_projection."
      )
    difference = precision.widen(x) - precision.widen(states)
    return jnp.mean(jnp.square(difference), axis=-1)


def _apply(
  model: Any, batch: language_model.Batch, *, deterministic: bool = True
) -> tuple[jax.Array, jax.Array]:
  """Returns hidden states [B,T,D] and logits [B,T,V]."""
  context = token_context.TokenContext.from_batch(
    batch, deterministic=deterministic
  )
  x = model.hidden(batch["inputs"], context)
  return x, language_model.LanguageHead(model).logits(x)


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
    jax.nn.log_softmax(precision.widen(x) / temperature)
    for x in (jax.lax.stop_gradient(teacher), student)
  )
  # Where the teacher's probability is 0, so is its term.
  terms = jnp.where(jnp.isneginf(teacher), 0, teacher - student)
  return jnp.sum(jnp.exp(teacher) * terms, axis=-1)


def top_kl(
  ids: Int[Array, "batch length top"],
  log_probs: Float[Array, "batch length top"],
  student: Float[Array, "batch length vocab"],
  *,
  temperature: float = 1.0,
) -> Float[Array, "batch length"]:
  """Returns the KL of each token with the other tokens as one outcome, in nats.

  Args:
    ids: The teacher's most likely tokens, distinct.
    log_probs: Their log probabilities by the teacher at `temperature`.
    student: Logits, divided by `temperature`.
    temperature: Divides logits.
  """
  student = jax.nn.log_softmax(precision.widen(student) / temperature)
  at = jnp.take_along_axis(student, ids, axis=-1)
  kl = jnp.sum(jnp.exp(log_probs) * (log_probs - at), axis=-1)
  if ids.shape[-1] == student.shape[-1]:
    return kl
  batch, position, _ = jnp.indices(ids.shape, sparse=True)
  others = student.at[batch, position, ids].set(-jnp.inf)
  # A sum of rounded probabilities may exceed 1.
  rest = 1 - jnp.sum(jnp.exp(log_probs), axis=-1)
  rest = jnp.clip(rest, jnp.finfo(rest.dtype).eps, 1)
  return kl + rest * (jnp.log(rest) - jax.nn.logsumexp(others, axis=-1))
