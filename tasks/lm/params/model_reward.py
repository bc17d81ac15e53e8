"""Rewards of answers by a trained reward model.

`ModelReward(folder="runs/judge")` is a `Task.reward`, such as of GRPO, where
the folder is a run of `preferences.HuggingFaceReward`.
"""

from collections.abc import Callable
import dataclasses
import functools
import os
from typing import Any

from etils import epath
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs.tokenizers import chat_template, conversation
from paxon.inputs.tokenizers import load as load_tokenizer
from paxon.layers.models import reward_lm
from paxon.runner import run_dir, user_error
from paxon.runner.checkpoints import stored_checkpoint
from paxon.tasks.lm.params import hugging_face

_PARAMS = "params/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelReward:
  """The reward of a trained `HuggingFaceReward` for an answer to a prompt.

  Attributes:
    folder: Its run directory. All parameters must have been trained, or
      adapters merged.
    length: Tokens of the longest conversation.
  """

  folder: str
  length: int = 512

  def __call__(self, prompt: str | list[Any], answer: str) -> float:
    """Returns the reward of an answer to a text, or to a list of messages.

    Raises:
      user_error.UserError: The folder has no reward model, or the conversation
        is too long.
    """
    template, tokenizer, score = self._loaded
    given = conversation.read({"prompt": prompt, "completion": answer})
    ids, _ = template.tokenize_whole(given, tokenizer)
    if len(ids) > self.length:
      raise user_error.UserError(
        f"ModelReward.length is {self.length}, and a conversation has"
        f" {len(ids)} tokens."
      )
    padding = (0, self.length - len(ids))
    padded, is_token = (
      np.pad(x, padding)[None] for x in (ids, np.ones_like(ids))
    )
    return float(score(padded, is_token)[0])

  @functools.cached_property
  def _loaded(self) -> tuple[Any, Any, Callable[..., jax.Array]]:
    name = type(self).__name__
    config, of = hugging_face.read_config(self.folder, name)
    path = run_dir.resolve(self.folder, os.environ)
    own = os.fspath(path / hugging_face.FOLDER)
    model = reward_lm.RewardLm(
      decoder=of.model(config), reward_head=reward_lm.make_head()
    )
    found = stored_checkpoint.find_checkpoint(epath.Path(path))
    names = [n for n in found.variables() if n.startswith(_PARAMS)]
    ids = jax.ShapeDtypeStruct((1, self.length), jnp.int32)
    made = jax.eval_shape(
      lambda ids: model.init(jax.random.key(0), ids, ids, method="rewards"), ids
    )
    wanted = traverse_util.flatten_dict(made, sep="/", is_leaf=_is_boxed)
    other = set(names) ^ set(wanted)
    if other:
      raise user_error.UserError(
        f"{name}.folder is {self.folder!r}, whose checkpoint is not one of a"
        f" trained HuggingFaceReward: {min(other)} is missing or not of it."
      )
    stored_checkpoint.verify(found)
    values = traverse_util.unflatten_dict(
      {
        n: jnp.asarray(x)
        for n, x in stored_checkpoint.read_numpy(found, names).items()
      },
      sep="/",
    )

    @jax.jit
    def score(ids: jax.Array, is_token: jax.Array) -> jax.Array:
      found: Any = model.apply(values, ids, is_token, method="rewards")
      return found

    tokenizer = load_tokenizer.load(own, padded_size=config.get("vocab_size"))
    return chat_template.load(own), tokenizer, score


def _is_boxed(path: Any, value: Any) -> bool:
  del path
  return not isinstance(value, dict)
