"""Where a model to simulate comes from: a callable, "module:function", a `transformers` configuration, or a preset.

Everything here is called under fake tensors: nothing is allocated, and nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from ..errors import ConfigError

# name: (configuration class, model class, arguments). Sizes are those of the published checkpoints.
_LLAMA = ("LlamaConfig", "LlamaForCausalLM")
_MIXTRAL = ("MixtralConfig", "MixtralForCausalLM")
_GPT2 = ("GPT2Config", "GPT2LMHeadModel")
_T5 = ("T5Config", "T5ForConditionalGeneration")
_VIT = ("ViTConfig", "ViTForImageClassification")
_RESNET = ("ResNetConfig", "ResNetForImageClassification")


def _llama(hidden, ffn, layers, heads, kv, vocab=32000, **more):
    return (*_LLAMA, dict(
        hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocab, max_position_embeddings=131072, use_cache=False, **more,
    ))  # fmt: skip


def _t5(model, ff, layers, heads, kv=64, **more):
    return (*_T5, dict(
        d_model=model, d_ff=ff, num_layers=layers, num_heads=heads, d_kv=kv, use_cache=False,
        decoder_start_token_id=0, **more,
    ))  # fmt: skip


def _gpt2(width, layers, heads):
    return (*_GPT2, dict(n_embd=width, n_layer=layers, n_head=heads, use_cache=False))


def _vit(width, layers, heads, patch=16):
    return (*_VIT, dict(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
        patch_size=patch, num_labels=1000,
    ))  # fmt: skip


PRESETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-1b": _llama(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True, head_dim=64),
    "llama-3b": _llama(3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True, head_dim=128),
    "llama-7b": _llama(4096, 11008, 32, 32, 32),
    "llama-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-13b": _llama(5120, 13824, 40, 40, 40),
    "llama-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "llama-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "mixtral-8x7b": (*_MIXTRAL, dict(use_cache=False)),
    "mixtral-8x22b": (*_MIXTRAL, dict(
        hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48, num_key_value_heads=8,
        use_cache=False,
    )),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "t5-small": _t5(512, 2048, 6, 8),
    "t5-base": _t5(768, 3072, 12, 12),
    "t5-large": _t5(1024, 4096, 24, 16),
    "t5-3b": _t5(1024, 16384, 24, 32, 128),
    "t5-11b": _t5(1024, 65536, 24, 128, 128),
    "vit-base": _vit(768, 12, 12),
    "vit-large": _vit(1024, 24, 16),
    "vit-huge": _vit(1280, 32, 16, 14),
    "resnet-18": (*_RESNET, dict(
        depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic", num_labels=1000)),
    "resnet-50": (*_RESNET, dict(num_labels=1000)),
    "resnet-152": (*_RESNET, dict(depths=[3, 8, 36, 3], num_labels=1000)),
}  # fmt: skip


@dataclasses.dataclass
class Source:
    """A model that can be built again and again. `config`: the transformers configuration, if there is one."""

    name: str
    make: Callable[[], nn.Module]
    config: Any = None


def source(model: Any, overrides: dict[str, Any] | None = None) -> Source:
    """The source that `model` names: a callable without arguments; "module:function"; a preset's name; the name of a
    transformers configuration class; a configuration file (config.json) or the folder of one; or a configuration.

    overrides: fields of the configuration to change (num_hidden_layers=2, ...).
    Raises ConfigError for what is none of these, and says what comes close.
    """
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"got a {type(model).__name__} that is built already. Pass a function that builds it, so that it can be "
            "built without memory: lambda: MyModel(...)."
        )
    if hasattr(model, "to_diff_dict"):  # a transformers configuration
        return _of_config(type(model).__name__, model, overrides)
    if callable(model):
        _no_overrides(overrides, "a callable")
        return Source(getattr(model, "__name__", type(model).__name__), model)
    if not isinstance(model, (str, Path)):
        raise ConfigError(f"cannot make a model of a {type(model).__name__}. {_HOW}")
    text = str(model)
    if text in PRESETS:
        config_name, model_name, fields = PRESETS[text]
        transformers = _transformers(text)
        config = getattr(transformers, config_name)(**{**fields, **(overrides or {})})
        return Source(text, lambda: _build(getattr(transformers, model_name), config), config)
    if ":" in text and not Path(text).exists():
        _no_overrides(overrides, "a function")
        return Source(text, _imported(text))
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _of_file(path, overrides)
    if text.endswith("Config"):
        transformers = _transformers(text)
        cls = getattr(transformers, text, None)
        if cls is None:
            raise ConfigError(f"transformers has no configuration class {text!r}.{_close(text, dir(transformers))}")
        return _of_config(text, cls(**(overrides or {})), None)
    raise ConfigError(f"no preset, file or function is called {text!r}.{_close(text, list(PRESETS))} {_HOW}")


_HOW = (
    "Use a preset (" + ", ".join(PRESETS) + "), a config.json, the name of a transformers configuration class "
    "(LlamaConfig), 'module:function', or in Python a function that builds the model."
)


def _close(text: str, known) -> str:
    near = difflib.get_close_matches(text, known, 3, 0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _no_overrides(overrides, what: str) -> None:
    if overrides:
        raise ConfigError(
            f"{', '.join(overrides)}: {what} takes no overrides; they are for transformers configurations."
        )


def _transformers(text: str):
    try:
        return importlib.import_module("transformers")
    except ImportError as e:
        raise ConfigError(
            f"{text!r} is built with transformers, which cannot be imported ({e}). pip install it."
        ) from e


def _imported(text: str) -> Callable[[], nn.Module]:
    module_name, _, function = text.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), function)
    except ImportError as e:
        raise ConfigError(f"{text!r}: module {module_name!r} cannot be imported ({e}). Is it on PYTHONPATH?") from e
    except AttributeError as e:
        raise ConfigError(f"{text!r}: module {module_name!r} has no {function!r}.") from e
    if not callable(found):
        raise ConfigError(f"{text!r} is a {type(found).__name__}; expected a function that builds the model.")
    return found


def _of_file(path: Path, overrides) -> Source:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist. {_HOW}")
    try:
        fields = json.loads(path.read_text())
        kind = fields["model_type"]
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is no configuration of transformers: {type(e).__name__}: {e}.") from e
    transformers = _transformers(str(path))
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if k != "model_type"})
    return _of_config(path.parent.name or kind, config, overrides)


def _of_config(name: str, config, overrides) -> Source:
    transformers = _transformers(name)
    for key, value in (overrides or {}).items():
        setattr(config, key, value)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a training step keeps no cache
    wanted = (getattr(config, "architectures", None) or [""])[0]
    cls = getattr(transformers, wanted, None)
    if cls is None:
        for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageClassification", "AutoModel"):
            mapping = getattr(transformers, auto)._model_mapping
            if type(config) in mapping:
                cls = mapping[type(config)]
                cls = cls[0] if isinstance(cls, tuple) else cls
                break
    if cls is None:
        raise ConfigError(f"transformers has no model for {type(config).__name__}. Pass a function that builds it.")
    return Source(name, lambda: _build(cls, config), config)


def _build(cls, config) -> nn.Module:
    # Experts as grouped matrix products: the loop over experts asks tensors for values, which a simulation lacks.
    if hasattr(config, "num_local_experts") or hasattr(config, "num_experts"):
        config._experts_implementation = "grouped_mm"
    return cls(config)


def default_batch(source: Source, batch: int, seq: int | None) -> dict[str, torch.Tensor]:
    """A batch for a model of a transformers configuration: `batch` samples of `seq` tokens, or of images.

    Raises ConfigError where the configuration does not say what the model takes.
    """
    config = source.config
    if config is None:
        raise ConfigError(f"{source.name} does not say what a batch is. Pass batch=, a function that makes one.")
    size = getattr(config, "image_size", None) or (224 if hasattr(config, "num_channels") else None)
    if size is not None and not hasattr(config, "vocab_size"):
        height, width = (size, size) if isinstance(size, int) else size
        return dict(
            pixel_values=torch.zeros(batch, config.num_channels, height, width),
            labels=torch.zeros(batch, dtype=torch.long),
        )
    if seq is None:
        raise ConfigError("a batch of tokens needs a sequence length: batch=(samples, tokens).")
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return dict(input_ids=tokens, labels=torch.zeros(batch, seq, dtype=torch.long))
