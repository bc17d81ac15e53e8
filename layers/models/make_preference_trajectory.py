r"""Writes `testdata/preference_trajectory.json` with TRL 1.16.0.

  python -m paxon.layers.models.make_preference_trajectory \
      layers/models/testdata

The losses of 20 steps of `DPOTrainer` on a tiny Llama, for DPO and IPO, and of
`KTOTrainer`, with AdamW at a constant learning rate and batches in order.
Weights are `golden_case.weight`; the reference is the same model at the start.
And those of a reward model, with the loss of `RewardTrainer`.
"""

import json
import pathlib
import pkgutil
import sys
import tempfile
from typing import Any

import numpy as np

from paxon.layers.models.hugging_face.golden_models import golden_case

CONFIG = {
  "model_type": "llama",
  "vocab_size": 40,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "tie_word_embeddings": False,
  "rms_norm_eps": 1e-6,
}
STEPS, BATCH, LENGTH = 20, 4, 12
LEARNING_RATE, BETA = 3e-3, 0.3
REWARD, CENTER = "reward", 0.01
# Log ratios per token are small, so IPO's target 1 / (2 beta) is too.
LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "kto": "kto"}


def pairs() -> list[dict[str, list[int]]]:
  """Returns the ids of a prompt and two answers of each pair."""
  random = np.random.RandomState(0)

  def ids(low: int, high: int) -> list[int]:
    size = random.randint(low, high)
    return random.randint(3, CONFIG["vocab_size"], size).tolist()

  return [
    {
      "prompt_ids": ids(2, 5),
      "chosen_ids": ids(1, 8),
      "rejected_ids": ids(1, 8),
    }
    for _ in range(STEPS * BATCH)
  ]


def answers() -> list[dict[str, Any]]:
  """Returns one answer of each pair with its label, and another of its batch.

  The last is what `KTOTrainer` estimates the divergence with.
  """
  found = [
    {
      "prompt_ids": pair["prompt_ids"],
      "completion_ids": pair["chosen_ids" if i % 3 else "rejected_ids"],
      "label": bool(i % 3),
    }
    for i, pair in enumerate(pairs())
  ]
  for i, each in enumerate(found):
    before = i - 1 if i % BATCH else i + BATCH - 1
    each["KL_completion_ids"] = found[before]["completion_ids"]
  return found


def train(loss: str, folder: str) -> list[float]:
  """Returns the loss of each step of TRL's trainer."""
  import datasets  # pyrefly: ignore[missing-import]
  import tokenizers
  import torch  # pyrefly: ignore[missing-import]
  import transformers  # pyrefly: ignore[missing-import]

  # In no lock of ours; see the module.
  kind = "KTO" if loss == "kto" else "DPO"
  trainer_class: Any = pkgutil.resolve_name(f"trl:{kind}Trainer")
  config_class: Any = pkgutil.resolve_name(f"trl:{kind}Config")

  config = transformers.LlamaConfig(**CONFIG)
  models = []
  for _ in range(2):
    model: Any = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
      for name, value in model.named_parameters():
        made = golden_case.weight(name, tuple(value.shape))
        value.copy_(torch.from_numpy(made))
    models.append(model)
  words = {f"w{i}": i for i in range(CONFIG["vocab_size"])}
  inner = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(words, unk_token="w0")
  )
  inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token="w1", eos_token="w2"
  )

  class Prepared(trainer_class):
    """Takes ids as they are; TRL's preparation would add end tokens."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
      return dataset

  trainer = Prepared(
    model=models[0],
    ref_model=models[1],
    args=config_class(
      output_dir=folder,
      use_cpu=True,
      report_to=[],
      bf16=False,
      loss_type=LOSSES[loss] if kind == "KTO" else [LOSSES[loss]],
      beta=BETA,
      per_device_train_batch_size=BATCH,
      max_steps=STEPS,
      learning_rate=LEARNING_RATE,
      lr_scheduler_type="constant",
      warmup_steps=0,
      weight_decay=0.0,
      max_grad_norm=1e9,
      adam_beta2=0.95,
      logging_steps=1,
      save_strategy="no",
      gradient_checkpointing=False,
      train_sampling_strategy="sequential",
      disable_dropout=True,
    ),
    train_dataset=datasets.Dataset.from_list(
      answers() if kind == "KTO" else pairs()
    ),
    processing_class=tokenizer,
  )
  trainer.train()
  history = trainer.state.log_history
  return [float(row["loss"]) for row in history if "loss" in row]


def train_rewards() -> list[float]:
  """Returns the loss of each step of a reward model, as of `RewardTrainer`.

  The loop is torch's and the model that of transformers, whose reward is that
  of the last token that is no padding.
  """
  import torch  # pyrefly: ignore[missing-import]
  import transformers  # pyrefly: ignore[missing-import]

  config = transformers.LlamaConfig(**CONFIG, num_labels=1, pad_token_id=1)
  model: Any = transformers.LlamaForSequenceClassification(config)
  with torch.no_grad():
    for name, value in model.named_parameters():
      made = golden_case.weight(name, tuple(value.shape))
      value.copy_(torch.from_numpy(made))
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
  )
  losses, given = [], pairs()
  for step in range(STEPS):
    batch = given[step * BATCH : (step + 1) * BATCH]
    texts = [
      torch.tensor(pair["prompt_ids"] + pair[key])
      for key in ("chosen_ids", "rejected_ids")
      for pair in batch
    ]
    ids = torch.nn.utils.rnn.pad_sequence(
      texts, batch_first=True, padding_value=1
    )
    rewards = model(input_ids=ids, attention_mask=(ids != 1).long()).logits
    chosen, rejected = rewards[:, 0].chunk(2)
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    loss = loss + CENTER * ((chosen + rejected) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  return losses


def main(folder: pathlib.Path) -> None:
  """Writes the goldens to a folder."""
  with tempfile.TemporaryDirectory() as temporary:
    found = {loss: train(loss, temporary) for loss in LOSSES}
  found[REWARD] = train_rewards()
  text = json.dumps(found, indent=1) + "\n"
  (folder / "preference_trajectory.json").write_text(text)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
