r"""Writes goldens of chats by transformers (5.23.0).

  python -m paxon.inputs.tokenizers.make_chat_goldens inputs/tokenizers/goldens

`chats.json` has ids and masks of
`apply_chat_template(..., return_assistant_tokens_mask=True)` with templates
that mark what the assistant wrote. `chat_families.json` has, for each record of
`chat_families` and each turn of the assistant, the prompt that inference
continues, and the text with the turn; arguments of tools are objects there, as
`transformers serve` decodes them.
"""

from collections.abc import Sequence
import json
import pathlib
import sys
from typing import Any

from paxon.inputs.tokenizers import chat_families

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


def write_tokenizer(
  folder: pathlib.Path,
  *,
  merges: Sequence[tuple[str, str]] = MERGES,
  special: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
  use_regex: bool = False,
) -> pathlib.Path:
  """Writes the `tokenizer.json` of bytes with few merges; returns its path."""
  import tokenizers

  pre = tokenizers.pre_tokenizers
  alphabet = sorted(pre.ByteLevel.alphabet())
  vocabulary = {letter: i for i, letter in enumerate(alphabet)}
  for pair in merges:
    vocabulary["".join(pair)] = len(vocabulary)
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [*merges]))
  made.pre_tokenizer = pre.ByteLevel(
    add_prefix_space=False, use_regex=use_regex
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  made.add_special_tokens([*special])
  path = folder / "tokenizer.json"
  made.save(str(path))
  return path


def write_family_tokenizer(folder: pathlib.Path) -> pathlib.Path:
  """Writes a tokenizer with the special tokens of all families.

  As in GPT-2, two line breaks are one token at the end of a text, and two
  before other text.
  """
  return write_tokenizer(
    folder,
    merges=[("Ċ", "Ċ"), *MERGES],
    special=chat_families.NAMES,
    use_regex=True,
  )


def _decode_arguments(messages: Sequence[Any]) -> list[dict[str, Any]]:
  found = json.loads(json.dumps(messages))
  for message in found:
    for call in message.get("tool_calls", ()):
      function = call["function"]
      if isinstance(function["arguments"], str):
        function["arguments"] = json.loads(function["arguments"])
  return found


def _list_families(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the goldens of the families."""
  import transformers  # pyrefly: ignore[missing-import]

  path = write_family_tokenizer(folder)
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(path), **chat_families.SPECIAL_TOKENS
  )
  found = []
  for family, template in chat_families.TEMPLATES.items():
    for number, record in enumerate(chat_families.list_records(family)):
      messages, turns = _decode_arguments(record["messages"]), []
      for i, message in enumerate(messages):
        if message["role"] != "assistant":
          continue
        shared = {"chat_template": template, "tools": record.get("tools")}
        prompt: Any = tokenizer.apply_chat_template(
          messages[:i], tokenize=False, add_generation_prompt=True, **shared
        )
        text: Any = tokenizer.apply_chat_template(
          messages[: i + 1], tokenize=False, **shared
        )
        turns.append({"prompt": prompt, "text": text})
      found.append({"family": family, "record": number, "turns": turns})
  return found


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
    families = _list_families(pathlib.Path(temporary))
  (folder / "chats.json").write_text(json.dumps(found) + "\n")
  lines = ",\n".join(map(json.dumps, families))
  (folder / "chat_families.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
