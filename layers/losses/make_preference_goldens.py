r"""Writes `testdata/preference_losses.json` with TRL 1.16.0.

  python layers/losses/make_preference_goldens.py layers/testdata

Values and gradients of ORPO and SimPO in float32, as TRL computes them; and in
float64 those of the training steps of TRL's trainers, with given log
probabilities in the place of a model: DPO, IPO, KTO, GRPO, DAPO and Dr. GRPO.
"""

import collections
import json
import pathlib
import pkgutil
import sys
import types
from typing import Any

_CHOSEN = [-0.3, -1.1, -2.0, -0.01]
_REJECTED = [-0.6, -0.2, -7.0, -3.0]
_REFERENCES = [[-0.5, -1.0, -1.4, -0.6], [-0.2, -0.9, -5.0, -3.5]]
_LENGTHS = [[3, 5, 1, 4], [4, 5, 2, 1]]
_LABELS = [True, False, True, False]
# Of KTO: log probabilities of answers to other prompts, and of the reference.
_OTHERS = [[-2.0, -1.0, -0.5, -3.0], [-2.5, -1.2, -0.4, -3.3]]
_MEANS = ("grpo", "dapo", "dr_grpo")


def _trainer(**fields: Any) -> Any:
  """Returns the attributes of a trainer that a single process reads."""
  return types.SimpleNamespace(
    accelerator=types.SimpleNamespace(
      device="cpu",
      num_processes=1,
      gather=lambda x: x,
      gather_for_metrics=lambda x: x,
      reduce=lambda x, reduction: x,
    ),
    model=types.SimpleNamespace(training=False),
    aux_loss_enabled=False,
    precompute_ref_logps=True,
    _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    _total_train_tokens=0,
    _tp_size=1,
    **fields,
  )


def _step_of_pairs(torch: Any, name: str, beta: float) -> dict[str, Any]:
  """Returns the loss and gradients of one step of DPO, IPO or KTO."""
  given = torch.tensor(
    [_CHOSEN, _REJECTED], dtype=torch.float64, requires_grad=True
  )
  references = torch.tensor(_REFERENCES, dtype=torch.float64)
  used = slice(0, 1) if name == "kto" else slice(0, 2)
  sums = given[used].reshape(-1)
  size = 8
  lengths = torch.tensor(_LENGTHS)[used].reshape(-1, 1)
  at = torch.arange(size)
  inputs = {
    "input_ids": torch.zeros(len(sums), size, dtype=torch.long),
    "attention_mask": torch.ones(len(sums), size, dtype=torch.long),
    # A prompt of one token; labels and predictions are shifted by one.
    "completion_mask": ((at > 0) & (at <= lengths)).long(),
  }
  # All of an answer's log probability is that of its first token.
  log_probs = torch.cat([sums[:, None], torch.zeros(len(sums), size - 2)], 1)
  zeros = torch.zeros_like(log_probs)

  def model(**_: Any) -> Any:
    return types.SimpleNamespace(
      log_probs=log_probs,
      entropy=zeros,
      mean_logits=zeros,
      is_top1=zeros.bool(),
    )

  if name == "kto":
    policy, fixed = (torch.tensor(x, dtype=torch.float64) for x in _OTHERS)
    trainer = _trainer(
      beta=beta,
      loss_type="kto",
      calculate_KL=True,
      desirable_weight=1.5,
      undesirable_weight=0.5,
      _compute_kl_logps=lambda *_: policy,
    )
    inputs |= {
      "label": torch.tensor(_LABELS),
      "ref_logps": references[0],
      "ref_KL_logps": fixed,
    }
    step: Any = pkgutil.resolve_name("trl:KTOTrainer")._compute_loss
  else:
    trainer = _trainer(
      beta=beta,
      ld_alpha=None,
      f_divergence_type="reverse_kl",
      loss_types=["sigmoid" if name == "dpo" else name],
      loss_weights=[1.0],
      use_weighting=False,
    )
    inputs |= {
      "ref_chosen_logps": references[0],
      "ref_rejected_logps": references[1],
    }
    step = pkgutil.resolve_name("trl:DPOTrainer")._compute_loss
  loss = step(trainer, model, inputs, False)
  loss.backward()
  return {
    "loss": name,
    "beta": beta,
    "value": loss.item(),
    "gradients": given.grad[used].tolist(),
  }


def _step_of_groups(torch: Any, mean: str, beta: float) -> dict[str, Any]:
  """Returns the loss and gradients of one step of GRPO, with its inputs."""
  generator = torch.Generator().manual_seed(0)

  def uniform(low: float, high: float) -> Any:
    drawn = torch.rand(6, 5, generator=generator, dtype=torch.float64)
    return low + (high - low) * drawn

  logs = -uniform(0.01, 4)
  arrays = {
    "log_probs": logs,
    # Ratios from 0.5 to 2, so that both limits clip.
    "old": logs + uniform(-0.7, 0.7),
    "reference": logs + uniform(-1, 1),
    "weights": (
      torch.arange(5) < torch.tensor([[5], [3], [1], [2], [4], [2]])
    ).double(),
  }
  advantages = torch.tensor([1.2, -0.4, 0.3, -1.0, 0.8, 0.1]).double()
  logs = logs.clone().requires_grad_()
  trainer = _trainer(
    loss_type=mean,
    beta=beta,
    epsilon_low=0.2,
    epsilon_high=0.28,
    max_completion_length=5,
    top_entropy_quantile=1.0,
    off_policy_mask_threshold=None,
    importance_sampling_level="token",
    args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False),
    use_vllm=False,
    _entropy_bonus_enabled=False,
    _get_per_token_logps_and_entropies=lambda *_, **__: (logs, logs, None),
  )
  mask = arrays["weights"]
  inputs = {
    "prompt_ids": torch.zeros(6, 1),
    "prompt_mask": torch.ones(6, 1),
    "completion_ids": torch.zeros(6, 5),
    "completion_mask": mask,
    "advantages": advantages,
    "old_per_token_logps": arrays["old"],
    "ref_per_token_logps": arrays["reference"],
    "num_items_in_batch": mask.sum(),
  }
  trainer_class: Any = pkgutil.resolve_name("trl:GRPOTrainer")
  loss = trainer_class._compute_loss(trainer, None, inputs)
  loss.backward()
  return {
    "mean": mean,
    "beta": beta,
    **{name: array.tolist() for name, array in arrays.items()},
    "advantages": advantages.tolist(),
    "value": loss.item(),
    "gradients": logs.grad.tolist(),
  }


def main(folder: pathlib.Path) -> None:
  """Writes the goldens to a folder."""
  import torch  # pyrefly: ignore[missing-import]

  # In no lock of ours; see the module.
  orpo_trainer: Any = pkgutil.resolve_name("trl.experimental.orpo:ORPOTrainer")
  cpo_trainer: Any = pkgutil.resolve_name("trl.experimental.cpo:CPOTrainer")

  def orpo(chosen: Any, rejected: Any, beta: float) -> Any:
    trainer = types.SimpleNamespace(
      beta=beta, accelerator=types.SimpleNamespace(device="cpu")
    )
    found = orpo_trainer.odds_ratio_loss(trainer, chosen, rejected)
    return -chosen - found[0]

  def simpo(chosen: Any, rejected: Any, beta: float, margin: float) -> Any:
    trainer = types.SimpleNamespace(
      beta=beta,
      simpo_gamma=margin,
      loss_type="simpo",
      label_smoothing=0.0,
      alpha=0.0,
      accelerator=types.SimpleNamespace(device="cpu"),
    )
    found = cpo_trainer.cpo_loss(trainer, chosen, rejected)
    return found[0]

  cases = []
  for name, fn, options in (
    ("orpo", orpo, {"beta": 0.25}),
    ("simpo", simpo, {"beta": 2.0, "margin": 1.0}),
  ):
    chosen, rejected = (
      torch.tensor(x, requires_grad=True) for x in (_CHOSEN, _REJECTED)
    )
    losses = fn(chosen, rejected, **options)
    losses.sum().backward()
    cases.append(
      {
        "loss": name,
        "options": options,
        "chosen": _CHOSEN,
        "rejected": _REJECTED,
        "values": losses.tolist(),
        "gradients": [chosen.grad.tolist(), rejected.grad.tolist()],
      }
    )
  pairs = [
    _step_of_pairs(torch, name, beta)
    for name, beta in (("dpo", 0.1), ("ipo", 0.4), ("kto", 0.2))
  ]
  groups = [
    _step_of_groups(torch, mean, b) for mean in _MEANS for b in (0.0, 0.3)
  ]
  inputs = {
    "references": _REFERENCES,
    "lengths": _LENGTHS,
    "labels": _LABELS,
    "others": _OTHERS,
  }
  found = {"answers": cases, "steps": pairs, "inputs": inputs, "groups": groups}
  text = json.dumps(found) + "\n"
  (folder / "preference_losses.json").write_text(text)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
