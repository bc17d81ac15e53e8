"""Tests for the validation of settings."""

import math
import re

import fiddle as fdl
import pytest

from paxon.layers.decoding import (
  beam_search,
  methods,
  samplers,
  sampling,
  speculative,
)
from paxon.quantization import lora, matmuls, recipes, rules
from paxon.runner import knobs
from paxon.runner.settings import (
  adapters,
  compiler,
  expected_kernels,
  generation,
  monitoring,
  quantization,
  training,
)

_START = {"checkpoint": "runs/base"}
_BAD_GROUP = (("a", None), ("b(.)", r"\2"))


@pytest.mark.parametrize(
  ("settings", "fields", "message"),
  [
    (training.Retention, {"newest": 0}, "newest must be positive, got 0"),
    (training.Retention, {"every_minutes": 0.0}, "must be positive, got 0"),
    (training.Retention, {"every_minutes": math.nan}, "positive, got nan"),
    (training.Retention, {"every_minutes": math.inf}, "positive, got inf"),
    (training.Retention, {"best": -1}, "best must not be negative, got -1"),
    (training.Retention, {"best": 2}, "together, got best=2 and metric=None"),
    (
      training.Retention,
      {"metric": "validation/loss"},
      "together, got best=0 and metric='validation/loss'",
    ),
    (
      training.Retention,
      {"best": 1, "metric": "loss"},
      "Retention.metric must be split/name, such as validation/loss, got 'los",
    ),
    (
      training.Retention,
      {"best": 1, "metric": "validation/"},
      "got 'validation/'",
    ),
    (
      monitoring.MonitoringSettings,
      {"histogram_every_steps": 0},
      "histogram_every_steps must be positive, got 0",
    ),
    (
      monitoring.MonitoringSettings,
      {"histogram_names": "params/.*"},
      "histogram_names ('params/.*') requires histogram_every_steps",
    ),
    (
      monitoring.MonitoringSettings,
      {"summary_level": 3},
      "summary_level must be from 0 to 2, got 3",
    ),
    (training.WarmStart, {"checkpoint": " "}, "WarmStart.checkpoint is empty"),
    (
      training.WarmStart,
      {**_START, "step": -1},
      "WarmStart.step must not be negative, got -1",
    ),
    (
      training.WarmStart,
      {**_START, "patterns": (("params/(", None),)},
      "WarmStart.patterns[0] is not a regular expression: 'params/('",
    ),
    (
      training.WarmStart,
      {**_START, "patterns": _BAD_GROUP},
      "WarmStart.patterns[1]: the template '\\\\2' does not fit the expression"
      " 'b(.)' with 1 groups: invalid group reference",
    ),
    (
      training.WarmStart,
      {**_START, "may_be_missing": ("params/.*", "*")},
      "WarmStart.may_be_missing[1] is not a regular expression: '*'",
    ),
    (
      training.WarmStart,
      {**_START, "averaged": True, "training_state": True},
      "averaged and WarmStart.training_state are both set",
    ),
    (training.EarlyStopping, {"metric": "loss"}, "split/name, such as"),
    (training.EarlyStopping, {"metric": "a/"}, "must be split/name"),
    (training.EarlyStopping, {"patience": 0}, "patience must be positive"),
    (
      training.EarlyStopping,
      {"min_delta": -1.0},
      "min_delta must not be negative, got -1.0",
    ),
    (training.EarlyStopping, {"min_delta": math.nan}, "negative, got nan"),
    (training.EarlyStopping, {"min_delta": math.inf}, "negative, got inf"),
    (training.EarlyStopping, {"target": math.nan}, "a number, got nan"),
    (training.EarlyStopping, {"patience": None}, "are both None"),
    (generation.GenerationSettings, {"prompts": ()}, "prompts is empty"),
    (generation.GenerationSettings, {"end_ids": ()}, "end_ids is empty"),
    (
      generation.GenerationSettings,
      {
        "search": beam_search.BeamSearch(beam_size=2),
        "speculation": speculative.PromptLookup(),
      },
      "GenerationSettings.speculation must be None with a search",
    ),
    (
      generation.GenerationSettings,
      {"speculation": speculative.PromptLookup(), "sampler": max},
      "GenerationSettings.speculation needs the sampler Greedy, Temperature or",
    ),
    (
      generation.DraftRun,
      {"run": "a", "num_tokens": 0},
      "DraftRun.num_tokens must be positive, got 0",
    ),
    (generation.DraftRun, {"run": ""}, "must be the directory of a run"),
    (
      generation.GenerationSettings,
      {"num_samples": 2},
      "num_samples is 2, but greedy samples of a prompt are all equal",
    ),
    (
      generation.GenerationSettings,
      {"max_new_tokens": 0},
      "GenerationSettings.max_new_tokens must be positive, got 0",
    ),
    (
      generation.GenerationSettings,
      {"max_new_tokens": 2**31},
      "max_new_tokens must be less than 2**31, got 2147483648",
    ),
    (
      monitoring.WatchdogSettings,
      {"factor": 0.0},
      "WatchdogSettings.factor must be positive, got 0.0",
    ),
    (monitoring.SpikeSettings, {"window": 0}, "window must be positive"),
    (
      monitoring.SpikeSettings,
      {"window": 10, "min_steps": 11},
      "min_steps (11) must be at most window (10)",
    ),
    (monitoring.SpikeSettings, {"loss_factor": 1.0}, "must be in (1, inf)"),
    (monitoring.MonitoringSettings, {"wandb_project": " "}, "not be empty"),
    (monitoring.MonitoringSettings, {"mlflow_experiment": ""}, "not be empty"),
    (
      monitoring.MonitoringSettings,
      {"mlflow_tracking_uri": "http://localhost"},
      "mlflow_tracking_uri ('http://localhost') requires mlflow_experiment",
    ),
    (
      monitoring.MonitoringSettings,
      {"wandb_entity": "me"},
      "wandb_entity ('me') requires wandb_project",
    ),
    (
      expected_kernels.ExpectedKernel,
      {"part": "attention forwards", "kernel": "cudnn"},
      "did you mean 'attention forward'?",
    ),
    (
      expected_kernels.ExpectedKernel,
      {"part": "attention forward", "kernel": "cuddn"},
      "does not compute attention forward; did you mean 'cudnn'?",
    ),
    (
      expected_kernels.ExpectedKernel,
      {"part": "matmuls", "kernel": "cudnn"},
      "ExpectedKernel.kernel is 'cudnn', which does not compute matmuls",
    ),
  ],
)
def test_invalid_values_are_rejected(settings, fields, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    settings(**fields)


def test_only_the_checkpoint_of_a_warm_start_is_required():
  start = fdl.build(fdl.Config(training.WarmStart, checkpoint="runs/base"))
  assert start == training.WarmStart(checkpoint="runs/base")
  assert (start.step, start.patterns, start.may_be_missing) == (None, (), ())
  assert not any((start.averaged, start.cast, start.training_state))


def test_monitoring_is_on_by_default_without_a_service():
  defaults = monitoring.MonitoringSettings()
  assert defaults.watchdog is not None
  assert defaults.spikes is not None
  assert defaults.wandb_project is None


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (
      {"--xla_x": 1},
      "'--xla_x' is not a valid name; .* dashes; use 'xla_x'\\.",
    ),
    ({"xla x": 1}, "'xla x' is not a valid name"),
    ({"xla_x": None}, r"\['xla_x'\] must be a bool, a number or a .* got None"),
    ({"xla_x": ["a"]}, r"a number or a string, got \['a'\]"),
  ],
)
def test_invalid_compiler_options_are_rejected(options, message):
  with pytest.raises(ValueError, match=message):
    compiler.check_options(options)


def test_unknown_option_set_is_rejected():
  with pytest.raises(
    ValueError, match="unknown set 'async_collective'; did you mean 'async_co"
  ):
    compiler.check_sets(["async_collective"])


@pytest.mark.parametrize(
  ("file", "message"),
  [
    ({"temperature": "x"}, "temperature must be a finite number, got 'x'"),
    ({"top_p": math.inf}, "top_p must be a finite number, got inf"),
    ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
    ({"num_beams": True}, "num_beams must be an integer, got True"),
    ({"early_stopping": []}, r"early_stopping must be true, false or 'never'"),
    ({"do_sample": "yes"}, "do_sample must be a boolean, got 'yes'"),
  ],
)
def test_generation_settings_of_another_type(file, message):
  settings = fdl.Config(generation.GenerationSettings)
  with pytest.raises(ValueError, match=f"generation_config.json: {message}"):
    generation.use_file(settings, file, generation.GenerationKnobs())


@pytest.mark.parametrize("value", ["x", 2**40, [None], {"a": 1}, [True], 1.5])
def test_end_ids_of_another_type(value):
  with pytest.raises(ValueError, match="eos_token_id must be an id or a list"):
    generation.read_end_ids(value)


def test_rules_of_groups():
  quantized = quantization.QuantizationKnobs
  assert quantization.make_rules(quantized()) == ()
  assert not quantization.serves(quantized(quantization="int8"))
  assert quantization.serves(quantized(quantization="int8:serve"))
  [rule] = quantization.make_rules(quantized(quantization="int8"))
  assert rule == rules.Rule(
    (matmuls.ATTENTION_PROJECTIONS, matmuls.FEED_FORWARD, matmuls.EXPERTS),
    recipes.find_recipe("int8"),
  )
  assert adapters.make_rules(adapters.AdapterKnobs(lora_alpha=2.0)) == ()
  given = adapters.AdapterKnobs(
    lora_rank=4, lora_kind="dora", lora_matmuls=("query",), lora_experts=True
  )
  adapter = lora.Lora(rank=4, alpha=None, kind=lora.Kind.DORA)
  dense = (matmuls.ATTENTION_PROJECTIONS, matmuls.FEED_FORWARD)
  assert adapters.make_rules(given) == (
    lora.LoraRule(dense, adapter, ("query",)),
    lora.LoraRule((matmuls.EXPERTS,), adapter, ("query",)),
  )


@pytest.mark.parametrize(
  ("given", "method"),
  [
    ({"best_end": True}, methods.BestEnd()),
    ({"best_end": False}, None),
    ({"cache_stages": (4, 8)}, methods.Growth(stages=(4, 8))),
    (
      {"guidance_scale": 2.0, "negative_prompt": "no"},
      generation.NegativePrompt(scale=2.0, prompt="no"),
    ),
    (
      {"rerank_every": 8, "rerank_samples": 4},
      methods.Rerank(interval=8, block_num_samples=4),
    ),
  ],
  ids=str,
)
def test_knobs_choose_a_decoding_method(given, method):
  config = generation.from_knobs(
    generation.GenerationKnobs(max_new_tokens=4, suffixes=(" yes",), **given)
  )
  settings = fdl.build(config)
  assert settings.method == method
  assert settings.suffixes == (" yes",)


def test_settings_of_a_sampler_keep_its_truncation():
  sampler = samplers.Temperature(top_k=4, top_p=0.8, global_normalize=True)
  assert generation.to_settings(sampler) == sampling.Settings(
    top_k=4, top_p=0.8, global_normalize=True
  )


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      {"search": beam_search.BeamSearch(beam_size=2)},
      r"method must be None with a search or speculation, got BestEnd",
    ),
    (
      {"speculation": speculative.PromptLookup()},
      r"method must be None with a search or speculation, got BestEnd",
    ),
    ({"suffixes": ("",)}, r"suffixes must have no empty text, got \('',\)"),
  ],
)
def test_rejects_settings_that_exclude_a_method(fields, message):
  with pytest.raises(ValueError, match=message):
    generation.GenerationSettings(method=methods.BestEnd(), **fields)


@pytest.mark.parametrize(
  ("make", "group", "message"),
  [
    (
      quantization.make_rules,
      quantization.QuantizationKnobs(quantization="int9"),
      r"QuantizationKnobs\.quantization = 'int9': .*did you mean 'int8'",
    ),
    (
      adapters.make_rules,
      adapters.AdapterKnobs(lora_rank=0),
      r"AdapterKnobs: Lora\.rank must be positive, got 0",
    ),
    (
      generation.from_knobs,
      generation.GenerationKnobs(top_k=3, min_p=0.1),
      r"GenerationKnobs\.top_k and min_p: set temperature, too",
    ),
    (
      generation.from_knobs,
      generation.GenerationKnobs(negative_prompt="x"),
      r"GenerationKnobs\.negative_prompt: set guidance_scale, too",
    ),
    (
      generation.from_knobs,
      generation.GenerationKnobs(best_end=True, cache_stages=(4, 8)),
      r"GenerationKnobs\.best_end and cache_stages are two methods",
    ),
  ],
)
def test_wrong_groups_are_named(make, group, message):
  with pytest.raises(knobs.KnobError, match=message):
    make(group)
