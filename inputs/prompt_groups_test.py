"""Tests for groups of prompts."""

import pytest

from paxon.inputs import byte_tokenizer, prompt_groups
from paxon.inputs.sources import example_source


def test_a_group_has_its_prompt_once():
  tokenizer = byte_tokenizer.ByteTokenizer()
  groups = prompt_groups.PromptGroups(
    source=example_source.InMemoryDocuments(["1+2=", "1+2+3+4="]),
    tokenizer=tokenizer,
    group_size=3,
    length=8,
    answer_length=3,
  )
  example = groups[0]
  assert example["inputs"].tolist() == [1, *tokenizer.encode("1+2="), *[0] * 19]
  assert example["is_token"].tolist() == [1] * 5 + [0] * 19
  assert {x.shape for x in example.values()} == {(24,)}
  with pytest.raises(ValueError, match="Prompt 1 has 9 tokens, and length"):
    groups[1]
