"""Regenerates the golden files with transformers.

  P=paxon.layers.models.hugging_face.golden_models
  python -m $P.make_goldens [CASE ...]

It needs torch and transformers 5. Without arguments it makes all cases.

  python -m $P.make_goldens minilm FOLDER

makes the sentence embeddings of all-MiniLM-L6-v2, whose files are in FOLDER.
"""

from collections.abc import Iterable, Mapping, Sequence
import json
import sys
from typing import Any

import numpy as np
import torch  # pyrefly: ignore[missing-import]
import transformers  # pyrefly: ignore[missing-import]

from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  golden_cases,
)

_CASES = {case.name: case for case in golden_cases.CASES}
_SENTENCES = (
  "A cat sits on the mat.",
  "Die Katze sitzt auf der Matte, naïve café!",
  "How do I train a model in JAX?",
  "Does anyone know how to fit a network with JAX?",
)
# Continuations whose best two logits are closer depend on rounding.
_MARGIN = 1e-3


def names() -> tuple[str, ...]:
  """Returns the names of all cases."""
  return tuple(_CASES)


def torch_model(name: str, **changes: Any) -> transformers.PreTrainedModel:
  """Returns the model of a case with its weights.

  Args:
    name: Name of the case.
    **changes: Overrides of its configuration.
  """
  case = _CASES[name]
  cls = getattr(transformers, case.architecture)
  model = cls(cls.config_class(**{**case.config, **changes}))
  model.config.architectures = [case.architecture]
  if case.has_own_head:
    # Where both are in a file and differ, transformers does not tie them.
    head = model.lm_head
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
  set_weights(model, case.renamed, experts=case.experts)
  return model.eval()


def set_weights(
  model: torch.nn.Module,
  renamed: Mapping[str, str],
  *,
  experts: Sequence[str] = (),
) -> None:
  """Sets each parameter to `golden_case.weight` of its name in files.

  Args:
    model: The model; tied parameters have the first of their names.
    renamed: Names in files, or parts of them, where they differ.
    experts: Names of gate, up and down projection in files with a tensor for
      each expert.
  """
  with torch.no_grad():
    biases = [
      each
      for each in model.named_buffers()
      if each[0].endswith("e_score_correction_bias")
    ]
    for name, parameter in (*model.named_parameters(), *biases):
      for old, new in renamed.items():
        name = name.replace(old, new)
      value = _weight(name, tuple(parameter.shape), experts)
      parameter.copy_(torch.from_numpy(value))


def _weight(
  name: str, shape: tuple[int, ...], experts: Sequence[str]
) -> np.ndarray:
  """Returns the values of a parameter, which may stack those of experts."""
  at, _, kind = name.rpartition(".")
  if not experts or not at.endswith(".experts"):
    return golden_case.weight(name, shape)
  gate, up, down = experts
  parts = {"gate_up_proj": (gate, up), "down_proj": (down,)}[kind]
  rows = shape[1] // len(parts)
  return np.stack(
    [
      np.concatenate(
        [
          golden_case.weight(f"{at}.{i}.{part}.weight", (rows, shape[2]))
          for part in parts
        ]
      )
      for i in range(shape[0])
    ]
  )


def make(name: str) -> golden_case.Golden:
  """Computes one case.

  Raises:
    ValueError: Two logits are so close that greedy decoding depends on
      rounding.
  """
  case = _CASES[name]
  model = torch_model(name)
  return golden_case.Golden(
    config=json.loads(model.config.to_json_string()),
    arrays=_ARRAYS.get(case.architecture, _causal_lm)(case, model),
  )


def _causal_lm(
  case: golden_case.Case, model: transformers.PreTrainedModel
) -> dict[str, np.ndarray]:
  ids = golden_case.ids(case.name, vocab_size=model.config.vocab_size)
  prompts = ids[:, : golden_case.PROMPT_LENGTH]
  return {
    "ids": ids,
    **_balance(model, ids),
    "logits": logits(model, {"ids": ids}),
    "greedy": _greedy(
      case, model, input_ids=prompts, attention_mask=np.ones_like(prompts)
    ),
  }


def _balance(
  model: transformers.PreTrainedModel, ids: np.ndarray
) -> dict[str, np.ndarray]:
  """Returns the balance loss of a mixture of experts, before its factor.

  The second sequence ends in padding.
  """
  if not hasattr(model.config, "router_aux_loss_coef"):
    return {}
  mask = golden_case.mask()
  with torch.no_grad():
    found = model(
      **_tensors({"input_ids": ids, "attention_mask": mask}),
      output_router_logits=True,
    )
  return {"balance": found.aux_loss.numpy().astype(np.float32)}


def _encoder_decoder(
  case: golden_case.Case, model: transformers.PreTrainedModel
) -> dict[str, np.ndarray]:
  vocab_size = model.config.vocab_size
  ids = golden_case.ids(case.name, vocab_size=vocab_size)
  encoder_ids = golden_case.ids(
    case.name, vocab_size=vocab_size, salt="encoder"
  )
  mask = golden_case.mask()
  inputs = {"ids": ids, "encoder_ids": encoder_ids, "encoder_mask": mask}
  greedy = _greedy(case, model, input_ids=encoder_ids, attention_mask=mask)
  return {**inputs, "logits": logits(model, inputs), "greedy": greedy}


def _masked_lm(
  case: golden_case.Case, model: transformers.PreTrainedModel
) -> dict[str, np.ndarray]:
  ids = golden_case.ids(case.name, vocab_size=model.config.vocab_size)
  types = golden_case.ids(
    case.name, vocab_size=model.config.type_vocab_size + 1, salt="types"
  )
  types -= 1
  mask = golden_case.mask()
  inputs = {"ids": ids, "mask": mask, "type_ids": types}
  return {**inputs, "logits": logits(model, inputs)}


def _images(
  case: golden_case.Case, model: transformers.PreTrainedModel
) -> dict[str, np.ndarray]:
  config = model.config
  images = golden_case.images(
    case.name, size=config.image_size, channels=config.num_channels
  )
  inputs = {"images": images}
  return {**inputs, "logits": logits(model, inputs)}


def _image_text(
  case: golden_case.Case, model: transformers.PreTrainedModel
) -> dict[str, np.ndarray]:
  vision, text = model.config.vision_config, model.config.text_config
  ids = golden_case.ids(case.name, vocab_size=text.vocab_size)
  # The ends of the texts, which the second has twice.
  ids[:, 13] = ids[1, 5] = text.eos_token_id
  images = golden_case.images(
    case.name, size=vision.image_size, channels=vision.num_channels
  )
  inputs = {"ids": ids, "images": images}
  with torch.no_grad():
    found = model(
      **_tensors({"input_ids": ids, "pixel_values": images}), return_loss=True
    )
  outputs = {
    "logits": found.logits_per_image,
    "image_embeddings": found.image_embeds,
    "text_embeddings": found.text_embeds,
    "loss": found.loss,
  }
  return {**inputs, **{k: x.numpy() for k, x in outputs.items()}}


def _speech(
  case: golden_case.Case, model: transformers.PreTrainedModel
) -> dict[str, np.ndarray]:
  config = model.config
  ids = golden_case.ids(case.name, vocab_size=config.vocab_size)
  features = golden_case.features(
    case.name, frames=2 * config.max_source_positions, bins=config.num_mel_bins
  )
  inputs = {"ids": ids, "features": features}
  # `generate` of Whisper adds rules about timestamps and languages.
  greedy = np.full_like(ids[:, :1], config.decoder_start_token_id)
  for _ in range(golden_case.NEW_IDS):
    last = logits(model, {"ids": greedy, "features": features})[:, -1]
    check_margins(case.name, [torch.from_numpy(last)])
    best = np.argmax(last, axis=-1).astype(np.int32)
    greedy = np.concatenate([greedy, best[:, None]], axis=1)
  return {**inputs, "logits": logits(model, inputs), "greedy": greedy[:, 1:]}


def _audio(
  case: golden_case.Case, model: transformers.PreTrainedModel
) -> dict[str, np.ndarray]:
  samples = 90
  audio = golden_case.audio(case.name, samples=samples)
  lengths = np.full(golden_case.BATCH, samples, np.int32)
  if model.config.feat_extract_norm == "layer":
    # Group norm of transformers sees padding.
    lengths[1] -= 31
  inputs = {"audio": audio, "audio_lengths": lengths}
  return {**inputs, "logits": logits(model, inputs)}


_ARRAYS = {
  "T5ForConditionalGeneration": _encoder_decoder,
  "BertForMaskedLM": _masked_lm,
  "BertForSequenceClassification": _masked_lm,
  "BertModel": _masked_lm,
  "CLIPModel": _image_text,
  "SiglipModel": _image_text,
  "ViTForImageClassification": _images,
  "Wav2Vec2ForCTC": _audio,
  "WhisperForConditionalGeneration": _speech,
}


def logits(
  model: transformers.PreTrainedModel, arrays: Mapping[str, np.ndarray]
) -> np.ndarray:
  """Returns the logits of a model for stored inputs; others are ignored."""
  has_encoder = "encoder_ids" in arrays or "features" in arrays
  arguments = {
    "ids": "decoder_input_ids" if has_encoder else "input_ids",
    "encoder_ids": "input_ids",
    "encoder_mask": "attention_mask",
    "mask": "attention_mask",
    "type_ids": "token_type_ids",
    "images": "pixel_values",
    "features": "input_features",
    "audio": "input_values",
  }
  given = {
    name: arrays[key] for key, name in arguments.items() if key in arrays
  }
  if "audio_lengths" in arrays:
    at = np.arange(arrays["audio"].shape[1])[None]
    inside = at < arrays["audio_lengths"][:, None]
    given["attention_mask"] = inside.astype(np.int32)
    given["input_values"] = np.where(inside, given["input_values"], 0)
  with torch.no_grad():
    found = model(**_tensors(given))
  # A model without a head has hidden states.
  kinds = ("logits", "logits_per_image", "last_hidden_state")
  result = next(found[kind] for kind in kinds if kind in found)
  return result.numpy().astype(np.float32)


def _greedy(
  case: golden_case.Case,
  model: transformers.PreTrainedModel,
  **inputs: np.ndarray,
) -> np.ndarray:
  """Returns the ids [ROWS, NEW_IDS] that follow."""
  generated = model.generate(
    **_tensors(inputs),
    max_new_tokens=golden_case.NEW_IDS,
    do_sample=False,
    eos_token_id=None,
    pad_token_id=0,
    return_dict_in_generate=True,
    output_logits=True,
  )
  check_margins(case.name, generated.logits)
  found = generated.sequences[:, -golden_case.NEW_IDS :]
  return found.numpy().astype(np.int32)


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
  """Returns ids as integers, and images and features channels first."""
  found = {}
  for name, x in arrays.items():
    found[name] = torch.from_numpy(x)
    if name in ("pixel_values", "input_features"):
      found[name] = found[name].movedim(-1, 1)
    elif name != "input_values":
      found[name] = found[name].long()
  return found


def check_margins(name: str, logits: Iterable[torch.Tensor]) -> None:
  """Raises ValueError if the two largest logits of a step are too close.

  Args:
    name: Name of the case.
    logits: Logits of each step, [batch, vocab].
  """
  for step in logits:
    best = torch.topk(step, 2, dim=-1).values
    margin = float((best[:, 0] - best[:, 1]).min())
    if margin < _MARGIN:
      raise ValueError(
        f"{name}: the two largest logits differ only by {margin:.2g}."
      )


def embed(folder: str, sentences: Sequence[str]) -> dict[str, Any]:
  """Returns ids and normalized mean embeddings of sentences."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.AutoModel.from_pretrained(folder).eval()
  batch = tokenizer(list(sentences), padding=True, return_tensors="pt")
  with torch.no_grad():
    hidden = model(**batch).last_hidden_state
  inside = batch["attention_mask"][:, :, None].to(hidden.dtype)
  mean = (hidden * inside).sum(1) / inside.sum(1)
  found = torch.nn.functional.normalize(mean, dim=1)
  lengths = batch["attention_mask"].sum(1).tolist()
  return {
    "ids": [
      row[:length]
      for row, length in zip(batch["input_ids"].tolist(), lengths, strict=True)
    ],
    "embeddings": [[round(x, 7) for x in row] for row in found.tolist()],
  }


def main(argv: Sequence[str]) -> None:
  """Writes the files of the named cases, or of all."""
  if argv[:1] == ["minilm"]:
    path = golden_case.FOLDER / "minilm.json"
    sentences = list(_SENTENCES)
    content = {"sentences": sentences, **embed(argv[1], sentences)}
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in content.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return
  for name in argv or names():
    golden = make(name)
    golden_case.write(name, golden)
    print(name, *golden.arrays.get("greedy", ()))


if __name__ == "__main__":
  main(sys.argv[1:])
