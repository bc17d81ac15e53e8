"""Chat templates in the style of public models, and conversations, for tests.

Each keeps what distinguishes its family: where the system prompt goes, what a
prompt ends with, how tools are called, and what becomes of earlier reasoning.
"""

# Special tokens of DeepSeek have wide letters.
# ruff: noqa: RUF001

from typing import Any

LLAMA3 = """
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
  {%- set system = messages[0]['content'] | trim %}
  {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n\\n" }}
{%- if tools is not none %}
  {{- "You have access to the following functions.\\n\\n" }}
  {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system }}{{- "<|eot_id|>" }}
{%- for message in messages %}
  {%- if 'tool_calls' in message %}
    {%- if not message.tool_calls | length == 1 %}
      {{- raise_exception("This model only supports single tool-calls!") }}
    {%- endif %}
    {%- set tool_call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
    {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
  {%- elif message.role == "tool" %}
    {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
    {{- message.content | tojson }}{{- "<|eot_id|>" }}
  {%- else %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_QWEN_TOOLS = """
{%- if tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}
    {{- messages[0].content + '\\n\\n' }}
  {%- endif %}
  {{- "# Tools\\n\\n<tools>" }}
  {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
  {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""

QWEN25 = (
  _QWEN_TOOLS
  + """
{%- for message in messages %}
  {%- if (message.role == "user") or (message.role == "assistant" and not
         message.tool_calls) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {{- '<|im_end|>' + '\\n' }}
  {%- elif message.role == "assistant" %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
    {%- for tool_call in message.tool_calls %}
      {%- if tool_call.function is defined %}
        {%- set tool_call = tool_call.function %}
      {%- endif %}
      {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}
      {{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == "tool" %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
    {{- '\\n</tool_response><|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)

# Only turns after the last question keep their reasoning.
QWEN3 = (
  _QWEN_TOOLS
  + """
{%- set ns = namespace(found=false, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
  {%- if not ns.found and message.role == "user" %}
    {%- set ns.found = true %}
    {%- set ns.last = messages|length - 1 - loop.index0 %}
  {%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- set content = message.content if message.content is string else '' %}
  {%- if message.role == "user" %}
    {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
  {%- elif message.role == "assistant" %}
    {%- set reasoning = '' %}
    {%- if message.reasoning_content is string %}
      {%- set reasoning = message.reasoning_content %}
    {%- elif '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].rstrip('\\n') %}
      {%- set reasoning = reasoning.split('<think>')[-1].lstrip('\\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
      {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
      {{- content.lstrip('\\n') }}
    {%- else %}
      {{- content }}
    {%- endif %}
    {%- for tool_call in message.tool_calls or [] %}
      {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
      {%- if tool_call.function %}
        {%- set tool_call = tool_call.function %}
      {%- endif %}
      {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
      {%- if tool_call.arguments is string %}
        {{- tool_call.arguments }}
      {%- else %}
        {{- tool_call.arguments | tojson }}
      {%- endif %}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == "tool" %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + content }}
    {{- '\\n</tool_response><|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}
"""
)

# The tools stand before the last question.
MISTRAL = """
{%- if messages[0]["role"] == "system" %}
  {%- set system = messages[0]["content"] %}
  {%- set rest = messages[1:] %}
{%- else %}
  {%- set rest = messages %}
{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in rest %}
  {%- if message["role"] == "user" %}
    {%- if tools is not none and (message == users[-1]) %}
      {{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
    {%- endif %}
    {%- if loop.last and system is defined %}
      {{- "[INST]" + system + "\\n\\n" + message["content"] + "[/INST]" }}
    {%- else %}
      {{- "[INST]" + message["content"] + "[/INST]" }}
    {%- endif %}
  {%- elif message.tool_calls is defined and message.tool_calls is not none %}
    {{- "[TOOL_CALLS][" }}
    {%- for call in message.tool_calls %}
      {{- call.function | tojson }}
      {%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}
    {{- "]" + eos_token }}
  {%- elif message["role"] == "assistant" %}
    {{- " " + message["content"] | trim + eos_token }}
  {%- elif message["role"] == "tool" %}
    {{- "[TOOL_RESULTS]" + message["content"] + "[/TOOL_RESULTS]" }}
  {%- else %}
    {{- raise_exception("Only user and assistant roles are supported!") }}
  {%- endif %}
{%- endfor %}
"""

# Channels; the reasoning of the last turn alone.
GPT_OSS = """
{{- "<|start|>system<|message|>You are ChatGPT.<|end|>" }}
{%- if messages[0].role in ("developer", "system") %}
  {{- "<|start|>developer<|message|># Instructions\\n\\n" }}
  {{- messages[0].content + "<|end|>" }}
  {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}
  {{- "<|start|>developer<|message|># Tools\\n\\n" + tools|tojson + "<|end|>" }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- if 'tool_calls' in message %}
      {%- set tool_call = message.tool_calls[0].function %}
      {%- if message.thinking %}
        {{- "<|start|>assistant<|channel|>analysis<|message|>" }}
        {{- message.thinking + "<|end|>" }}
      {%- endif %}
      {{- "<|start|>assistant to=functions." + tool_call.name }}
      {{- "<|channel|>commentary json<|message|>" }}
      {{- tool_call.arguments|tojson + "<|call|>" }}
    {%- elif loop.last and not add_generation_prompt %}
      {%- if message.thinking is defined %}
        {{- "<|start|>assistant<|channel|>analysis<|message|>" }}
        {{- message.thinking + "<|end|>" }}
      {%- endif %}
      {{- "<|start|>assistant<|channel|>final<|message|>" }}
      {{- message.content + "<|return|>" }}
    {%- else %}
      {{- "<|start|>assistant<|channel|>final<|message|>" }}
      {{- message.content + "<|end|>" }}
    {%- endif %}
  {%- elif message.role == 'tool' %}
    {{- "<|start|>functions to=assistant<|message|>" }}
    {{- message.content|tojson + "<|end|>" }}
  {%- else %}
    {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""

# No turn keeps its reasoning, and the prompt begins it.
R1 = """
{%- set ns = namespace(system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
  {%- set ns.system = message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
  {%- if message['role'] == 'user' %}
    {{- '<｜User｜>' + message['content'] }}
  {%- endif %}
  {%- if message['role'] == 'assistant' and message['content'] is none %}
    {%- for tool in message['tool_calls'] %}
      {{- '<｜Assistant｜><｜tool▁call▁begin｜>' + tool['type'] }}
      {{- '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' }}
      {{- tool['function']['arguments'] | tojson + '\\n```' }}
      {{- '<｜tool▁call▁end｜><｜end▁of▁sentence｜>' }}
    {%- endfor %}
  {%- elif message['role'] == 'assistant' %}
    {%- set content = message['content'] %}
    {%- if '</think>' in content %}
      {%- set content = content.split('</think>')[-1] %}
    {%- endif %}
    {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
  {%- endif %}
  {%- if message['role'] == 'tool' %}
    {{- '<｜tool▁output▁begin｜>' + message['content'] }}
    {{- '<｜tool▁output▁end｜>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' + think }}{%- endif %}
"""

GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
  {%- set prefix = messages[0]['content'] + '\\n\\n' %}
  {%- set rest = messages[1:] %}
{%- else %}{%- set prefix = '' %}{%- set rest = messages %}{%- endif %}
{%- for message in rest %}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception("Conversation roles must alternate") }}
  {%- endif %}
  {%- set role = 'model' if message['role'] == 'assistant' else 'user' %}
  {{- '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
  {{- message['content'] | trim }}{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

PHI = """
{%- for message in messages %}
  {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}
{%- else %}{{- eos_token }}{%- endif %}
"""

CHATML = (
  "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
  "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# As ChatML, with marks; the answer may begin with a line break.
MARKED = (
  "{% for m in messages %}{{'<|im_start|>' + m.role + '\\n'}}"
  "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
  "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content }}"
  "{{ '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEMPLATES = {
  "llama3": LLAMA3,
  "qwen2.5": QWEN25,
  "qwen3": QWEN3,
  "mistral": MISTRAL,
  "gpt-oss": GPT_OSS,
  "r1": R1.replace("think }}", "'' }}"),
  "r1-think": R1.replace("think }}", "'<think>\\n' }}"),
  "gemma": GEMMA,
  "phi": PHI,
  "chatml": CHATML,
  "marked": MARKED,
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = (
  *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"),
  *("<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]"),
  *("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
  *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|start|>", "<|end|>"),
  *("<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
  *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
  *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>"),
  "<|system|>",
)

_TOOLS = [
  {
    "type": "function",
    "function": {
      "name": "weather",
      "description": "Weather of a city, <now> & later.",
      "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "default": None}},
      },
    },
  }
]
PLAIN: dict[str, Any] = {
  "messages": [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "\n2"},
    {"role": "user", "content": "\nZoë 🦊?\n"},
    {"role": "assistant", "content": "\n\n A fox."},
  ]
}
THOUGHT: dict[str, Any] = {
  "messages": [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>\nOne.\n</think>\n\n2"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>\nTwo.\n</think>\n\n4"},
  ]
}
REASONED: dict[str, Any] = {
  "messages": [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2", "reasoning_content": "One."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "Two."},
  ]
}


def _with_tools(arguments: Any) -> dict[str, Any]:
  function = {"name": "weather", "arguments": arguments}
  call = {"id": "call00001", "type": "function", "function": function}
  return {
    "tools": _TOOLS,
    "messages": [
      {"role": "user", "content": "Bern?"},
      {"role": "assistant", "content": None, "tool_calls": [call]},
      {"role": "tool", "tool_call_id": "call00001", "content": '{"t": 3}'},
      {"role": "assistant", "content": "3 °C."},
    ],
  }


CALLED = _with_tools({"city": "Bern"})
CALLED_AS_TEXT = _with_tools('{"city": "Bern"}')
# The records that each family can read.
_REASONING = {"qwen3": (THOUGHT, REASONED), "gpt-oss": (REASONED,)}
_REASONING |= {"r1": (THOUGHT,), "r1-think": (THOUGHT,)}
_NO_TOOLS = ("gemma", "phi", "chatml", "marked")


def list_records(family: str) -> list[dict[str, Any]]:
  """Returns the records that a family can read."""
  found = [] if family == "r1-think" else [PLAIN]
  found += _REASONING.get(family, ())
  if family not in (*_NO_TOOLS, "r1-think", "r1"):
    found += [CALLED, CALLED_AS_TEXT]
  return found
