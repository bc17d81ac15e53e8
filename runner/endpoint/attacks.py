"""Requests that would end or stall an endpoint: grammars, values and bodies."""

from collections.abc import Iterator
import json
from typing import Any, Final

Grammar = tuple[str, Any]


def make_grammars() -> dict[str, Grammar]:
  """Returns kinds and sources of grammars, by the fault of each."""
  return {**_make_schemas(), **_make_texts()}


def _make_schemas() -> dict[str, Grammar]:
  text = {"type": "string"}
  numbers: Any = range(3000)

  def refer(count: int, wrap: Any) -> Any:
    found = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": {**found, f"d{count}": text}, "$ref": "#/$defs/d0"}

  def nest(count: int, wrap: Any) -> Any:
    found: Any = text
    for _ in range(count):
      found = wrap(found)
    return found

  def properties(value: Any) -> Any:
    return {"type": "object", "properties": {"a": value}, "required": ["a"]}

  def items(value: Any) -> Any:
    return {"type": "array", "items": value}

  loop = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
  tree = {"a": properties({"$ref": "#/$defs/a"})}
  found = {
    "1,000 nested objects by $ref": refer(1000, properties),
    "1,000 nested arrays by $ref": refer(1000, items),
    "1,000 nested unions by $ref": refer(1000, lambda x: {"anyOf": [x, text]}),
    "a chain of 2,500 $ref": refer(2500, lambda x: x),
    "a chain of 200 $ref": refer(200, lambda x: x),
    "a loop of $ref": {"$defs": loop, "$ref": "#/$defs/a"},
    "a $ref to itself": {"$ref": "#"},
    "an object that must hold itself": {"$defs": tree, "$ref": "#/$defs/a"},
    "a $ref to a site": {"$ref": "http://127.0.0.1:9/schema.json"},
    "a $ref to a file": {"$ref": "file:///etc/passwd"},
    "a $ref to nothing": {"$ref": "#/$defs/none"},
    "a $ref that is a number": {"$ref": 7},
    "a $schema at a site": {"$schema": "http://127.0.0.1:9/s", **text},
    "an $id and a relative $ref": {"$id": "http://127.0.0.1:9/", "$ref": "x"},
    "120 nested arrays": nest(120, items),
    "120 nested objects": nest(120, properties),
    "400 nested arrays": nest(400, items),
    "12 nested unions": nest(12, lambda x: {"anyOf": [x, items(x)]}),
    "30,000 values": {"enum": [f"v{i}" for i in range(10 * len(numbers))]},
    "9,000 values": {"enum": [f"v{i}" for i in range(3 * len(numbers))]},
    "no value": {"enum": []},
    "a value of 20,000 characters": {"const": "a" * 20_000},
    "a minLength of 10^9": {**text, "minLength": 10**9},
    "a maxLength of 10^9": {**text, "maxLength": 10**9},
    "a minLength of 10^400": {**text, "minLength": 10**400},
    "a negative minLength": {**text, "minLength": -1},
    "no length": {**text, "minLength": 5, "maxLength": 2},
    "minItems of 10^9": {**items(text), "minItems": 10**9},
    "maxItems of 10^7": {**items(text), "maxItems": 10**7},
    "minItems of items": {**items({**items(text), "minItems": 9999})},
    "1,000 properties": {
      "type": "object",
      "properties": {f"p{i}": text for i in numbers[:1000]},
    },
    "1,000 required properties": {
      "type": "object",
      "properties": {f"p{i}": text for i in numbers[:1000]},
      "required": [f"p{i}" for i in numbers[:1000]],
    },
    "30 patterns at once": {
      "allOf": [{**text, "pattern": f".*a.{{{i}}}b.*"} for i in range(30)]
    },
    "a pattern that repeats": {**text, "pattern": "((a{1,99}){1,99}){1,99}"},
    "a pattern that backtracks": {**text, "pattern": "^(a+)+$"},
    "a pattern that is not valid": {**text, "pattern": "(["},
    "a bound of 10^300": {"type": "integer", "minimum": 10**300},
    "bounds of 10^18": {"type": "integer", "maximum": 10**18, "minimum": -9},
    "a tiny multipleOf": {"type": "number", "multipleOf": 1e-300},
    "a multipleOf of 0": {"type": "number", "multipleOf": 0},
    "a type that is a number": {"type": 7},
    "an unknown type": {"type": "nonsense"},
    "500 types": {"type": ["string"] * 500},
    "an unknown format": {**text, "format": "nonsense"},
    "not": {"not": {}},
    "nothing": {"anyOf": []},
    "a surrogate": {"const": "\ud800"},
    "options of the library": {"x-guidance": {"item_separator": "(" * 999}},
  }
  return {name: ("json", schema) for name, schema in found.items()}


def _make_texts() -> dict[str, Grammar]:
  regexes = {
    "10^10 characters": "((((a{100}){100}){100}){100}){100}",
    "100^5 of a class": r"((((\w{100}){100}){100}){100}){100}",
    "an exponential automaton": "(a|b)*a(a|b){40}",
    "two exponential automata": "((a|b)*a(a|b){30}|(a|c)*c(a|c){30}){40}",
    "20,000 parentheses": "(" * 20_000 + ")" * 20_000,
    "20,000 characters": "a" * 20_000,
    "200,000 characters": "a" * 200_000,
    "10,000 words": "|".join(f"w{i}" for i in range(10_000)),
    "20,000 characters in a class": "["
    + "".join(map(chr, range(0x4E00, 0x9C20)))
    + "]{1,999}",
    "classes of Unicode": r"(\p{L}{0,999}\p{N}){0,99}",
    "a look-ahead": "(?=a)b",
    "a reference to a group": r"(a)\1",
    "an open class": "[a",
    "a repeat of nothing": "*",
    "a repeat in reverse": "a{5,2}",
    "a huge repeat": "a{99999999999}",
    "no text": "",
    "a NUL": "\0",
    "a surrogate": "\ud800",
    "nothing matches": r"[^\s\S]",
  }
  lark = {
    "3,000 rules": "start: r0\n"
    + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(3000))
    + 'r3000: "b"\n',
    "a rule of itself": "start: start\n",
    "left recursion": 'start: start "a" | "a"\n',
    "ambiguity": 'start: a*\na: b* | "x"\nb: a* | "y"\n',
    "10^10 repeats": 'start: ("a"{100000}){100000}\n',
    "10^6 repeats of a rule": 'start: x{1000000}\nx: "a" | "b"\n',
    "3,000 parentheses": f'start: {"(" * 3000}"a"{")" * 3000}\n',
    "an unknown rule": "start: none\n",
    "an unknown import": "%import none.NONE\nstart: NONE\n",
    "a file": '%import "/etc/passwd"\nstart: "a"\n',
    "a token that does not exist": "start: <[999999]>\n",
    "a range of tokens": "start: <[0-258]>* \n",
    "a special token": "start: <|endoftext|>\n",
    "a schema in it": 'start: %json {"$ref": "#"}\n',
    "a schema in it that is not JSON": "start: %json {\n",
    "a regex in it": "start: /(((a{100}){100}){100}){100}/\n",
    "a complement": "start: A\nA: /.*a.{20}/ & ~/.*b.{20}/\n",
    "no rule": "",
    "not a grammar": "\0\x01\x02",
    "an error without an end": "start: (" * 9000,
  }
  return {
    **{f"regex: {name}": ("regex", text) for name, text in regexes.items()},
    **{f"lark: {name}": ("grammar", text) for name, text in lark.items()},
  }


# JSON that hardly any field takes.
VALUES: Final = (
  *("null", "true", "false", "0", "-0.0", "1", "-1", "0.5", "129", "1e400"),
  *("-1e400", "1e-400", "1e-40", "NaN", "Infinity", "-Infinity", "1e308"),
  *(str(2**31), str(2**63), str(2**64), str(-(2**63)), "1" + "0" * 400),
  *("9" * 5000, '""', '" "', '"1"', '"nan"', r'"\ud800"', r'"\u0000"'),
  *(f'"{"x" * 100_000}"', "[]", "[null]", "[[]]", "[[[1]]]", "[1e400]", "[-1]"),
  *(f"[{10**30}]", '["a", 1]', "[true]", r'["\ud800"]', "[{}]", "{}"),
  *('{"type": "json_object"}', '{"a": 1}', '{"": {}}', '{"a": null}'),
  *(f'{{"{"9" * 5000}": 1}}', '{"1": 1e400}', '{"1": true}', '{"٣": 1}'),
  *('{"-1": 1}', '{"1": 1, "1": 2}', f"{'[' * 300}{']' * 300}"),
  *('{"a":' * 300 + "1" + "}" * 300, '{"type": ["json_schema"]}'),
)
FIELDS: Final = (
  *("model", "prompt", "messages", "max_tokens", "max_completion_tokens"),
  *("temperature", "top_p", "top_k", "min_p", "min_tokens", "n", "best_of"),
  *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
  *("logit_bias", "logprobs", "top_logprobs", "stop", "stream", "user", "echo"),
  *("stream_options", "response_format", "structured_outputs", "suffix"),
  *("tools", "unknown", r"\ud800"),
)


def make_bodies(model: str) -> Iterator[tuple[str, bytes]]:
  """Yields paths and bodies: half of the values in each field, others."""
  chat, text = "/v1/chat/completions", "/v1/completions"
  user = '[{"role": "user", "content": "x"}]'
  for i, name in enumerate(FIELDS):
    is_chat = name in ("messages", "max_completion_tokens", "response_format")
    is_chat |= name in ("top_logprobs", "tools", "unknown")
    for value in VALUES[i % 2 :: 2]:
      fields = {"model": json.dumps(model), "max_tokens": "2"}
      fields |= {"messages": user} if is_chat else {"prompt": '"x"'}
      fields[name] = value
      body = ", ".join(f'"{key}": {value}' for key, value in fields.items())
      yield chat if is_chat else text, f"{{{body}}}".encode()
  head = f'{{"model": "{model}", "prompt": '.encode()
  for body in (
    *(b"", b"null", b"[]", b'"x"', b"{", b"}", b"\0", b"\xff\xfe{\0}\0"),
    *(b"\xef\xbb\xbf{}", b"{} {}", b"[" * 100_000, b'{"a":' * 100_000),
    head + b'"\xff"}',
    head + b'"x", "n": 1, "n": 2}',
    head + b'"x", "' + b"y" * 3_000_000 + b'": 1}',
    head + b'"x", "logit_bias": {' + b'"1": 1,' * 300_000 + b'"2": 1}}',
    head + b"[" + b"1," * 1_000_000 + b"1]}",
    head + b"[" + b'"",' * 500_000 + b'""]}',
    head + b"[" + b"[]," * 500_000 + b"[]]}",
    head + b'"' + b"a" * 4_000_000 + b'"}',
    head + b"9" * 1_000_000 + b"}",
    head + b'"x", "stop": [' + b'"a",' * 500_000 + b'"a"]}',
    b"{" + b",".join(b'"%d": 1' % i for i in range(200_000)) + b"}",
  ):
    yield text, body
