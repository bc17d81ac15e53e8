"""Regenerates `testdata` with transformers and tokenizers.

  python -m paxon.tools.hf_goldens.make_goldens [FAMILY ...]

It needs torch and transformers 5. Without arguments it makes both tokenizers
and all families; with them only these families. The tokenizers are `bytes`, as
those of GPT-2 and Qwen (byte-level, ChatML, no begin token), and `pieces`, as
those of Llama 2 and Gemma (SentencePiece's spaces, byte fallback, a begin
token). For each decoder `goldens.json` has its configuration and what
transformers computes with the weights of `golden_case.weight`.
"""

from collections.abc import Mapping, Sequence
import json
import math
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import tokenizers  # pyrefly: ignore[missing-import]
import torch  # pyrefly: ignore[missing-import]
import transformers  # pyrefly: ignore[missing-import]

from paxon.layers.models.hugging_face.golden_models import make_goldens
from paxon.tools.hf_goldens import imported_models

_VOCAB_SIZE = 340
_NEW_TOKENS = 24
_CHATML = (
  "{% for message in messages %}\n"
  "    {%- if loop.first and message.role != 'system' %}\n"
  "{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}\n"
  "    {%- endif %}\n"
  "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n'"
  " }}\n"
  "{%- endfor %}\n"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_INST = (
  "{{ bos_token }}{% for message in messages %}"
  "{% if message['role'] == 'user' %}"
  "{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
  "{% elif message['role'] == 'assistant' %}"
  "{{ ' ' + message['content'] + eos_token }}"
  "{% else %}{{ raise_exception('Only user and assistant roles.') }}{% endif %}"
  "{% endfor %}"
)


def make_tokenizers() -> None:
  """Trains both tokenizers and writes their folders."""
  models, processors = tokenizers.models, tokenizers.processors
  pre, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
  found = tokenizers.Tokenizer(models.BPE())
  found.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
  found.decoder = decoders.ByteLevel()
  _train(
    found,
    "bytes",
    special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    alphabet=pre.ByteLevel.alphabet(),
    config={
      "eos_token": "<|im_end|>",
      "pad_token": "<|endoftext|>",
      "chat_template": _CHATML,
    },
    ends=["<|im_end|>", "<|endoftext|>"],
  )
  pieces = tokenizers.Tokenizer(
    models.BPE(byte_fallback=True, unk_token="<unk>")
  )
  pieces.normalizer = tokenizers.normalizers.Sequence(
    [
      tokenizers.normalizers.Prepend("\u2581"),
      tokenizers.normalizers.Replace(" ", "\u2581"),
    ]
  )
  pieces.decoder = decoders.Sequence(
    [
      decoders.Replace("\u2581", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
  _train(
    pieces,
    "pieces",
    special=special,
    alphabet=[],
    config={
      "bos_token": "<s>",
      "eos_token": "</s>",
      "unk_token": "<unk>",
      "chat_template": _INST,
    },
    ends=["</s>"],
    processor=processors.TemplateProcessing(
      single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    ),
  )


def _train(
  found: Any,
  name: str,
  *,
  special: Sequence[str],
  alphabet: Sequence[str],
  config: Mapping[str, str],
  ends: Sequence[str],
  processor: Any = None,
) -> None:
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=_VOCAB_SIZE - 4,
    special_tokens=list(special),
    initial_alphabet=list(alphabet),
    show_progress=False,
  )
  found.train_from_iterator([imported_models.TEXT] * 3, trainer)
  if processor is not None:
    found.post_processor = processor
  folder = imported_models.FOLDER / name
  folder.mkdir(parents=True, exist_ok=True)
  content = json.loads(found.to_str())
  # Byte tokens stand for text.
  content["added_tokens"] = [
    token
    for token in content["added_tokens"]
    if not token["content"].startswith("<0x")
  ]
  _write(folder / "tokenizer.json", content)
  _write(
    folder / "tokenizer_config.json",
    {**config, "tokenizer_class": "PreTrainedTokenizerFast"},
  )
  _write(
    folder / "generation_config.json",
    {"eos_token_id": [found.token_to_id(end) for end in ends]},
  )


def make(name: str) -> dict[str, Any]:
  """Returns the configuration of a model, and what transformers computes."""
  kind = imported_models.TOKENIZERS[name]
  positions = {
    "n_positions" if name.startswith("gpt2") else "max_position_embeddings": 128
  }
  model = make_goldens.torch_model(
    name,
    vocab_size=_VOCAB_SIZE,
    bos_token_id=None,
    eos_token_id=None,
    **positions,
  )
  tokenizer = transformers.AutoTokenizer.from_pretrained(
    imported_models.FOLDER / kind
  )
  ends = json.loads(
    (imported_models.FOLDER / kind / "generation_config.json").read_text()
  )["eos_token_id"]
  prompt = tokenizer(imported_models.PROMPT, return_tensors="pt").input_ids
  text = tokenizer.decode(
    _generate(name, model, prompt, ends)[0], skip_special_tokens=True
  )
  chat = tokenizer.apply_chat_template(
    imported_models.MESSAGES,
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
  ).input_ids
  reply = _generate(name, model, chat, ends)[0, chat.shape[1] :]
  nll, tokens = score(model, tokenizer(imported_models.TEXT).input_ids)
  return {
    "config": json.loads(model.config.to_json_string()),
    "chat_prompt": tokenizer.apply_chat_template(
      imported_models.MESSAGES, add_generation_prompt=True, tokenize=False
    ),
    "text": text,
    "reply": tokenizer.decode(reply, skip_special_tokens=True),
    "perplexity": math.exp(nll / tokens),
    "tokens": tokens,
    "losses": _train_losses(model, name),
  }


def _generate(
  name: str, model: Any, ids: torch.Tensor, ends: Sequence[int]
) -> torch.Tensor:
  found = model.generate(
    ids,
    attention_mask=torch.ones_like(ids),
    max_new_tokens=_NEW_TOKENS,
    do_sample=False,
    eos_token_id=list(ends),
    pad_token_id=0,
    return_dict_in_generate=True,
    output_logits=True,
  )
  make_goldens.check_margins(name, found.logits)
  return found.sequences


def score(model: Any, ids: Sequence[int]) -> tuple[float, int]:
  """Returns the negative log likelihood of all ids but the first."""
  length, stride = imported_models.LENGTH, imported_models.LENGTH // 2
  total, known = 0.0, 1
  for start in range(0, len(ids), stride):
    window = ids[start : start + length + 1]
    with torch.no_grad():
      logits = model(torch.tensor([window[:-1]])).logits[0].double()
    scores = torch.log_softmax(logits, -1)
    for i in range(known - start, len(window)):
      total -= float(scores[i - 1, window[i]])
    known = start + len(window)
    if known == len(ids):
      break
  return total, known - 1


def _train_losses(model: Any, name: str) -> list[float]:
  """Returns the losses of a few steps of AdamW on the batches of Paxon."""
  with tempfile.TemporaryDirectory() as folder:
    batches, rates, eps = imported_models.training_setup(
      pathlib.Path(folder), name, json.loads(model.config.to_json_string())
    )
  model.eval()  # No dropout.
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=1.0, betas=(0.9, 0.95), eps=eps, weight_decay=0.0
  )
  losses = []
  for batch, rate in zip(batches, rates, strict=True):
    ids, positions, targets, weights = (
      torch.from_numpy(np.asarray(batch[key]))
      for key in ("inputs", "positions", "targets", "weights")
    )
    logits = model(ids.long(), position_ids=positions.long()).logits
    nll = torch.nn.functional.cross_entropy(
      logits.flatten(0, 1), targets.long().flatten(), reduction="none"
    )
    loss = (nll * weights.flatten()).sum() / weights.sum()
    losses.append(float(loss.detach()))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
  return losses


def _write(path: pathlib.Path, content: Any) -> None:
  text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False)
  path.write_text(text + "\n")


def main(argv: Sequence[str]) -> None:
  """Writes the goldens of the named families, or all files."""
  if not argv:
    make_tokenizers()
  path = imported_models.FOLDER / "goldens.json"
  found = imported_models.read_goldens() if argv else {}
  found |= {name: make(name) for name in argv or imported_models.TOKENIZERS}
  _write(path, found)


if __name__ == "__main__":
  main(sys.argv[1:])
