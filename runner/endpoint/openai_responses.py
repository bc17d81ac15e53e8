"""Responses of OpenAI's protocol, made of the tokens of each choice."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import secrets
import time
from typing import Any

import numpy as np

from paxon.layers.decoding import continuous_batching
from paxon.runner.endpoint import openai_requests, text_stream

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
  """Incremental output of one token.

  Attributes:
    text: Text that is certain now.
    tokens: Tokens since the last delta, without the end token.
    finish: Why the choice ended; None if it goes on.
  """

  text: str
  tokens: tuple[continuous_batching.Token, ...]
  finish: str | None


class Choice:
  """One choice as its tokens arrive.

  Attributes:
    num_tokens: Number of generated tokens, including an end token.
  """

  def __init__(self, stream: text_stream.TextStream) -> None:
    """Begins without tokens."""
    self.num_tokens = 0
    self._stream = stream
    self._tokens: list[continuous_batching.Token] = []

  def add(self, token: continuous_batching.Token) -> Delta:
    """Returns the incremental output of a token."""
    self.num_tokens += 1
    text, finish = "", token.finish
    if finish != "stop":
      text = self._stream.add(token.id)
      self._tokens.append(token)
    if self._stream.stopped:
      finish = "stop"
    elif finish is not None:
      text += self._stream.finish()
    tokens: tuple[continuous_batching.Token, ...] = ()
    if text or finish is not None:
      tokens, self._tokens = tuple(self._tokens), []
    return Delta(text=text, tokens=tokens, finish=finish)


class Responses:
  """The JSON of the responses to one request."""

  def __init__(
    self, request: openai_requests.Completion, *, model: str, tokenizer: Any
  ) -> None:
    """Chooses the id and the time of the response."""
    self._request, self._tokenizer = request, tokenizer
    kind = "chatcmpl" if request.is_chat else "cmpl"
    self._id = f"{kind}-{secrets.token_hex(12)}"
    self._created, self._model = int(time.time()), model

  def make_choices(self) -> list[Choice]:
    """Returns the choices of all prompts; choices of a prompt are adjacent."""
    return [
      Choice(
        text_stream.TextStream(
          self._tokenizer,
          before=() if prompt.is_chat else prompt.ids,
          stops=self._request.stops,
        )
      )
      for prompt in self._request.prompts
      for _ in range(self._request.n)
    ]

  def whole(
    self, deltas: Sequence[Sequence[Delta]], choices: Sequence[Choice]
  ) -> Json:
    """Returns the response of a request that does not stream."""
    found = []
    for index, each in enumerate(deltas):
      text = "".join(delta.text for delta in each)
      choice: Json = {
        "index": index,
        "finish_reason": each[-1].finish,
        "logprobs": self._logprobs([t for d in each for t in d.tokens], 0),
      }
      if self._request.is_chat:
        choice["message"] = {
          "role": "assistant",
          "content": text,
          "refusal": None,
        }
      else:
        choice["text"] = text
      found.append(choice)
    return {**self._head(), "choices": found, "usage": self._usage(choices)}

  def first_chunk(self, index: int) -> Json | None:
    """Returns the chunk before the first token of a choice, if there is one."""
    if not self._request.is_chat:
      return None
    delta = {"role": "assistant", "content": "", "refusal": None}
    return self._chunk(index, delta=delta)

  def chunk(self, index: int, delta: Delta, offset: int) -> Json | None:
    """Returns the chunk of a delta; None if there is nothing to send.

    `offset` is the length of the text before it.
    """
    if not delta.text and delta.finish is None:
      return None
    text: Json = {"text": delta.text}
    if self._request.is_chat:
      text = {"delta": {"content": delta.text} if delta.text else {}}
    return self._chunk(
      index,
      **text,
      logprobs=self._logprobs(delta.tokens, offset),
      finish_reason=delta.finish,
    )

  def usage_chunk(self, choices: Sequence[Choice]) -> Json:
    """Returns the last chunk, with the number of tokens."""
    return {**self._head(), "choices": [], "usage": self._usage(choices)}

  def _head(self) -> Json:
    kind = "text_completion"
    if self._request.is_chat:
      kind = "chat.completion" + (".chunk" if self._request.stream else "")
    return {
      "id": self._id,
      "object": kind,
      "created": self._created,
      "model": self._model,
    }

  def _chunk(self, index: int, **fields: Any) -> Json:
    choice = {"index": index, "logprobs": None, "finish_reason": None, **fields}
    usage = {"usage": None} if self._request.include_usage else {}
    return {**self._head(), "choices": [choice], **usage}

  def _usage(self, choices: Sequence[Choice]) -> Mapping[str, int]:
    prompt = sum(len(each.ids) for each in self._request.prompts)
    completion = sum(choice.num_tokens for choice in choices)
    return {
      "prompt_tokens": prompt,
      "completion_tokens": completion,
      "total_tokens": prompt + completion,
    }

  def _logprobs(
    self, tokens: Sequence[continuous_batching.Token], offset: int
  ) -> Json | None:
    if self._request.logprobs is None:
      return None
    if self._request.is_chat:
      content = [
        {
          **self._entry(token.id, token.log_prob),
          "top_logprobs": [self._entry(*each) for each in token.alternatives],
        }
        for token in tokens
      ]
      return {"content": content, "refusal": None}
    texts = [self._text(token.id) for token in tokens]
    lengths = np.cumsum([offset, *map(len, texts)])
    return {
      "tokens": texts,
      "token_logprobs": [_finite(token.log_prob) for token in tokens],
      # The most likely of ids with the same text, and the generated one.
      "top_logprobs": [
        {
          self._text(i): _finite(x)
          for i, x in (
            (token.id, token.log_prob),
            *reversed(token.alternatives),
          )
        }
        for token in tokens
      ]
      if self._request.logprobs
      else None,
      "text_offset": lengths[:-1].tolist(),
    }

  def _entry(self, number: int, log_prob: float) -> Json:
    text = self._text(number)
    # Its bytes are not known if they are no characters.
    is_text = "\ufffd" not in text
    return {
      "token": text,
      "logprob": _finite(log_prob),
      "bytes": list(text.encode()) if is_text else None,
    }

  def _text(self, number: int) -> str:
    return self._tokenizer.decode(np.asarray([number], np.int32))


def _finite(log_prob: float) -> float:
  """Returns a number that JSON has; OpenAI's -9999 stands for impossible."""
  return log_prob if math.isfinite(log_prob) else -9999.0
