"""A renderer of chat templates, for a process with limits.

A template is a program of a stranger: it may loop forever, build a string of
any size or recurse until the stack ends, also within one operation of Python.
`template_process` therefore runs this file as a program. It imports nothing but
Jinja and the standard library, and reads requests of one line of JSON:

  {"source": "...", "names": true}
  {"source": "...", "messages": [...], "variables": {...},
   "calls": [{"count": 2, "variables": {"add_generation_prompt": true}}]}

A call renders the first `count` messages. A reply is a line, too: `names`, the
names and strings of the template, or `texts`, one for each call, or `error`
with `is_syntax`.
"""

import datetime
import functools
import json
import os
import sys
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox

BEGIN, END = "_generation_begin", "_generation_end"
# Seconds of CPU time for a request, and bytes of address space.
_SECONDS = 2
_MEMORY = 1 << 30
# Characters of a text: at most so many times those of its request, and more.
_MAX_GROWTH = 16
_MIN_SIZE = 1 << 20
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Generation(ext.Extension):
  """`{% generation %}...{% endgeneration %}`: text of the assistant."""

  tags = {"generation"}  # noqa: RUF012

  def parse(self, parser: Any) -> Any:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    # Without values the marks are empty.
    begin, end = (
      nodes.Output([nodes.Name(name, "load")]).set_lineno(line)
      for name in (BEGIN, END)
    )
    # A separate scope, as a call block has.
    return [begin, nodes.Scope(body).set_lineno(line), end]


class _Dict:
  """`dict`, without its other attributes."""

  def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
    return dict(*args, **fields)

  def fromkeys(self, *args: Any) -> dict[Any, Any]:
    return dict.fromkeys(*args)


def _make_environment() -> sandbox.SandboxedEnvironment:
  """Returns a sandbox as transformers makes it."""

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
  ) -> str:
    return json.dumps(
      x,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
    )

  def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, ext.loopcontrols],
  )
  environment.filters["tojson"] = tojson
  names: Any = environment.globals
  names.update(raise_exception=raise_exception, strftime_now=strftime_now)
  names["dict"] = _Dict()
  return environment


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> Any:
  return _make_environment().from_string(source)


@functools.lru_cache(maxsize=8)
def _asks_for_none(source: str) -> bool:
  """Whether a template asks if the content of a message is none.

  Such templates (DeepSeek R1) find tool calls by a content of none, where
  others would print it.
  """
  for test in _make_environment().parse(source).find_all(nodes.Test):
    of: Any = test.node
    if test.name == "none" and "content" in (
      getattr(of, "attr", None),
      getattr(getattr(of, "arg", None), "value", None),
    ):
      return True
  return False


def _find_names(source: str) -> list[str]:
  """Returns the names, attributes and strings of a template."""
  tree = _make_environment().parse(source)
  found = {node.name for node in tree.find_all(nodes.Name)}
  found |= {node.attr for node in tree.find_all(nodes.Getattr)}
  values = (node.value for node in tree.find_all(nodes.Const))
  return sorted(found | {x for x in values if isinstance(x, str)})


def _to_message(message: dict[str, Any], *, add_none: bool) -> dict[str, Any]:
  """Returns a message with its reasoning under the names that templates use."""
  if add_none and message.get("tool_calls"):
    message = {"content": None, **message}
  found = (message[key] for key in _REASONING if message.get(key) is not None)
  reasoning = next(found, None)
  if reasoning is None:
    return message
  return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _render(request: dict[str, Any], limit: int) -> list[str]:
  """Returns the text of each call.

  Raises:
    jinja2.TemplateError: A text is too long.
  """
  template, texts = _compile(request["source"]), []
  add_none = _asks_for_none(request["source"])
  messages = [_to_message(m, add_none=add_none) for m in request["messages"]]
  for call in request["calls"]:
    parts, size = [], 0
    for part in template.generate(
      **{
        **request["variables"],
        **call["variables"],
        "messages": messages[: call["count"]],
      }
    ):
      parts.append(part)
      size += len(part)
      if size > limit:
        raise jinja2.TemplateError(
          f"the text has more than {limit:,} characters"
        )
    texts.append("".join(parts))
  return texts


def _answer(line: bytes) -> dict[str, Any]:
  is_syntax = True
  try:
    request = json.loads(line)
    if request.get("names"):
      return {"names": _find_names(request["source"])}
    _compile(request["source"])
    is_syntax = False
    return {"texts": _render(request, _MIN_SIZE + _MAX_GROWTH * len(line))}
  except MemoryError:
    error = "it needs more than 1 GiB of memory"
  except RecursionError:
    error = "it recurses without end"
  except jinja2.TemplateError as found:
    error = str(found)
  except Exception as found:  # Raised by the template's own program.
    error = f"{type(found).__name__}: {found}"
  return {"error": error[:1000], "is_syntax": is_syntax}


def _limit_time() -> None:
  import resource

  times = os.times()
  soft = int(times.user + times.system) + 1 + _SECONDS
  hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
  resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _limit_memory() -> None:
  import resource

  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  try:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
  except ValueError:  # macOS has no such limit.
    return


def main() -> None:
  """Answers the requests of standard input until it ends."""
  _limit_memory()
  with os.fdopen(os.dup(1), "wb") as replies:
    # Nothing but replies may be written there.
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
      _limit_time()
      replies.write(json.dumps(_answer(line)).encode() + b"\n")
      replies.flush()


if __name__ == "__main__":
  main()
