r"""Writes `goldens/chats.json`: ids and masks of chats by transformers.

  python inputs/tokenizers/make_chat_goldens.py inputs/tokenizers/goldens

`apply_chat_template(..., return_assistant_tokens_mask=True)` of transformers
(5.23.0) with templates that mark what the assistant wrote.
"""

import json
import pathlib
import sys
from typing import Any

CHATS: tuple[list[dict[str, str]], ...] = (
  [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
  ],
  [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello.\nWho?"},
    {"role": "user", "content": "Me: Zoë 🦊"},
    {"role": "assistant", "content": "Ah..."},
  ],
  [
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "No, Zoë."},
  ],
)
TEMPLATES = {
  "special": (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{%- else %}{{ m.content }}<|im_end|>{{ '\n' }}{%- endif %}"
    "{%- endfor %}"
  ),
  # Borders within tokens: ": " and ".\n" are one token each.
  "plain": (
    "{% for m in messages %}{{ m.role }}:"
    "{%- if m.role == 'assistant' %}"
    "{% generation %} {{ m.content }}{% endgeneration %}"
    "{%- else %} {{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
  ),
}
MERGES = [(":", "Ġ"), (".", "Ċ"), ("H", "i"), ("l", "l"), ("Ġ", "A")]


def write_tokenizer(folder: pathlib.Path) -> pathlib.Path:
  """Writes the `tokenizer.json` of bytes with few merges; returns its path."""
  import tokenizers

  pre = tokenizers.pre_tokenizers
  alphabet = sorted(pre.ByteLevel.alphabet())
  vocabulary = {letter: i for i, letter in enumerate(alphabet)}
  for pair in MERGES:
    vocabulary["".join(pair)] = len(vocabulary)
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, MERGES))
  made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
  path = folder / "tokenizer.json"
  made.save(str(path))
  return path


def main(folder: pathlib.Path) -> None:
  """Writes the goldens to a folder."""
  import tempfile

  import transformers  # pyrefly: ignore[missing-import]

  found: list[dict[str, Any]] = []
  with tempfile.TemporaryDirectory() as temporary:
    path = write_tokenizer(pathlib.Path(temporary))
    tokenizer = transformers.PreTrainedTokenizerFast(
      tokenizer_file=str(path), eos_token="<|im_end|>"
    )
    for name, template in TEMPLATES.items():
      for number, chat in enumerate(CHATS):
        result: Any = tokenizer.apply_chat_template(
          chat,
          chat_template=template,
          return_dict=True,
          return_assistant_tokens_mask=True,
        )
        found.append(
          {
            "template": name,
            "chat": number,
            "ids": list(result["input_ids"]),
            "mask": list(result["assistant_masks"]),
          }
        )
  (folder / "chats.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
