"""Tests for chat templates; expected texts are Jinja's and transformers'."""

import json

import pytest

from paxon.inputs.tokenizers import chat_template, testing

_SOURCE = (
  "{% for m in messages %}\n"
  "  {% if m.role == 'user' %}\n"
  "U:{{ m.content }}\n"
  "  {% else %}\n"
  "A:{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n"
  "  {% endif %}\n"
  "{% endfor %}\n"
  "{% if add_generation_prompt %}A:{% endif %}"
)
_CHAT = [
  {"role": "user", "content": "1?"},
  {"role": "assistant", "content": "2"},
]


def _template(source=_SOURCE):
  return chat_template.ChatTemplate(
    source=source, special_tokens={"eos_token": "$"}
  )


def test_blocks_leave_no_lines():
  # trim_blocks removes the newline after a block; after `generation`, too.
  assert _template()(_CHAT[:1]) == "U:1?\nA:"
  assert _template()(_CHAT, add_generation_prompt=False) == "U:1?\nA:2$"


@pytest.mark.parametrize(
  ("source", "text"),
  [
    ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}]'),
    ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
    ("{{ tools is none }}{{ think }}", "True1"),
    ("{{ messages[0].content }}", "<é>"),
  ],
)
def test_sees_what_transformers_gives(source, text):
  messages = [{"role": "user", "content": "<é>"}]
  assert _template(source)(messages, think=1) == text


def test_the_date_is_that_of_today():
  assert len(_template("{{ strftime_now('%Y-%m-%d') }}")([])) == 10


@pytest.mark.parametrize(
  ("source", "messages", "message"),
  [
    ("{{ raise_exception('No system.') }}", [], "chat template: No system."),
    ("{% if %}", [], "is not a Jinja program"),
    ("{{ messages.append(1) }}", [], "chat template: .*append"),
    ("{{ ''.__class__.mro() }}", [], "chat template: .*__class__"),
    ("x", [{"content": "a"}], "Message 0 .* must be an object with a string"),
  ],
)
def test_rejects(source, messages, message):
  with pytest.raises(ValueError, match=message):
    _template(source)(messages)


def test_a_template_that_changes_earlier_turns_is_rejected():
  forgets = "{{ messages[-1].content }}"
  with pytest.raises(ValueError, match="changes the text before message 1"):
    _template(forgets).tokenize(_CHAT, testing.Letters())


@pytest.mark.parametrize("name", ["chat_template.jinja", "other"])
def test_finds_the_template_of_a_folder(tmp_path, name):
  (tmp_path / name).write_text("{{ eos_token }}")
  config = {
    "eos_token": {"content": "</s>"},
    "chat_template": [{"name": "default", "template": "{{ eos_token }}!"}],
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  loaded = chat_template.load(str(tmp_path))
  assert loaded([]) == ("</s>" if name.endswith("jinja") else "</s>!")


def test_a_folder_without_a_template(tmp_path):
  with pytest.raises(ValueError, match="has no chat template"):
    chat_template.load(str(tmp_path))
