"""Strict reading of config.json: every key is used, known to be harmless, or refused by name.

Values are checked and typed. A null key counts as absent.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from serve_llm.common.errors import ModelError, OptionError

Choice = TypeVar("Choice", bound=str)

HARMLESS = frozenset(
    # what the file is and who wrote it
    "architectures model_type transformers_version _name_or_path auto_map name_or_path unsloth_version unsloth_fixed "
    "torch_dtype dtype transformers.js_config is_llama_config "
    # labels and outputs of other heads
    "id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params custom_pipelines "
    "classifier_dropout sentence_transformers sbert_ce_default_activation_function is_matryoshka matryoshka_dimensions "
    "return_dict return_dict_in_generate output_attentions output_hidden_states output_scores output_router_logits "
    # token ids: those of the tokenizer and generation_config.json count
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id forced_bos_token_id "
    "forced_eos_token_id tokenizer_class prefix "
    # generation defaults: those of generation_config.json count
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "remove_invalid_values cache_implementation "
    # training and execution, without effect on what the model computes at inference
    "use_cache initializer_range attention_dropout chunk_size_feed_forward torchscript use_bfloat16 tf_legacy_loss "
    "attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled "
    "_experts_implementation gradient_checkpointing pretraining_tp is_decoder neftune_noise_alpha lora_rank ep_size "
    "debug micro_forward skip_checkpoint "  # InternVL's training
    # a window that takes effect only with `use_sliding_window`, a separate key
    "max_window_layers "
    # also stated by the tokenizer's files or the Hub's cache
    "model_max_length _commit_hash force_download resume_download local_files_only trust_remote_code "
    # only in encoder-decoder models, which `REFUSED` excludes
    "cross_attention_hidden_size tie_encoder_decoder".split()
)
# Harmless by name: settings of the tokenizer, of training and its random initial weights, and of the image parts around
# the text part of LLaVA.
HARMLESS_NAMES = re.compile(r"tokenizer_.+|.+_pdrop|(.+_)?dropout(_prob|_rate|_p)?|initializer_.+|.+_loss_coef|mm_.+")
# Harmless flags by name: training, and the choice of code that computes attention.
HARMLESS_FLAGS = re.compile(
    r"(freeze|tune)_.+|(use_)?(flash_att(entio)?n|memory_efficient_attention|sdpa|xformers)(_2)?"
)
# Flags for additional parts and outputs: false means the plain model ...
ADDITIONS = re.compile(r"(use|add|enable|with|has)_.+|output_(?!proj|layer).+")
# ... unless the name contains one of these words for parts that every model has.
USUAL_PARTS = frozenset(
    "attention causal mask masks rope rotary position positions positional norm norms layernorm rmsnorm rms scale "
    "scaling residual residuals gate gated glu swiglu softmax mlp".split()
)
TINIEST = 1e-37  # smallest accepted magnitude, within float32's range
LARGEST = 1e38  # largest accepted magnitude, within float32's range
REFUSED = {  # these change the computation, so they are supported only when off
    "is_encoder_decoder": "encoder-decoder models",
    "add_cross_attention": "cross-attention layers",
    "pruned_heads": "pruned heads",
    "rope_interleaved": "interleaved rotary embedding",
    "use_mrope": "multimodal rotary embedding",
}


class ConfigReader:
    """Reads config.json key by key. `done()` at the end reports the keys that were not read.

    allowed: unknown keys to ignore; those of a nested object as "key.inner".
    """

    def __init__(
        self, values: Mapping[str, object], where: str = "config.json", allowed: Iterable[str] = (), path: str = ""
    ) -> None:
        """path: of an object inside the file, such as "rope_scaling."; its keys are named with it in options."""
        self._allowed = frozenset(allowed)
        self._path = path
        self._values = {key: value for key, value in values.items() if value is not None}
        self._null = {key for key, value in values.items() if value is None}
        self._where = where
        self._taken: set[str] = set()
        self._objects: dict[str, ConfigReader] = {}
        for key, meaning in REFUSED.items():
            if self._values.get(key) not in (None, False, {}):
                raise ModelError(f"{where}: {key} asks for {meaning}, which this program does not serve")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys and values, for objects whose keys are arbitrary names."""
        return tuple(self._values)

    def names_code(self, repository: str) -> bool:
        """Whether `auto_map` or `_name_or_path` says that the checkpoint's code comes from a repository on the Hub."""
        places = [self._values.get("_name_or_path"), *self.mapping("auto_map").values()]
        return any(str(place).partition("--")[0] == repository for place in places)

    def names_code_class(self, name: str) -> bool:
        """Whether `auto_map` names a class of this name in the checkpoint's code."""
        return any(str(place).rpartition(".")[2] == name for place in self.mapping("auto_map").values())

    def set_defaults(self, **values: object) -> None:
        """Set defaults of keys that the file lacks."""
        self._values = values | self._values

    def inherit(self, key: str, outer: ConfigReader) -> None:
        """Take the key from the enclosing object unless this object has it. It need not be read."""
        self._taken.add(key)
        if key in outer._values:
            self._values.setdefault(key, outer._values[key])

    def renamed(self, names: Mapping[str, str]) -> ConfigReader:
        """Return a reader of the same file with renamed keys: a key in the values of `names` is read under its mapped
        name."""
        own_names = {name: key for key, name in names.items()}
        renamed = copy.copy(self)
        renamed._values = {own_names.get(key, key): value for key, value in self._values.items()}
        renamed._null = {own_names.get(key, key) for key in self._null}
        renamed._taken = {own_names.get(key, key) for key in self._taken}
        return renamed

    def without(self, key: str) -> ConfigReader:
        """Return a reader of the same file without a key that has been read."""
        other = copy.copy(self)
        other._values = {name: value for name, value in self._values.items() if name != key}
        return other

    def is_null(self, key: str) -> bool:
        """Whether the file contains null, where that differs from an absent key."""
        self._taken.add(key)
        return key in self._null

    def _take(self, key: str) -> object:
        self._taken.add(key)
        return self._values.get(key)

    def _wrong(self, key: str, expected: str, value: object) -> ModelError:
        return ModelError(f"{self._where}: {key} must be {expected}, but it is {value!r}")

    def _missing(self, key: str) -> ModelError:
        return ModelError(f"{self._where}: {key} is missing")

    def integer(self, key: str, default: int | None = None, *, lowest: int = 1, highest: int = 2**31 - 1) -> int:
        """Read a whole number from `lowest` to `highest`; required without a default."""
        value = self._take(key)
        if value is None:
            if default is None:
                raise self._missing(key)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise self._wrong(key, f"an integer of at least {lowest}", value)
        if value > highest:
            raise self._wrong(key, f"an integer of at most {highest}", value)
        return value

    def layers(self, key: str) -> int:
        """Read the number of layers. Bounded, because lists of layers are built before any weight is read."""
        return self.integer(key, highest=10_000)

    def number(self, key: str, default: float | None = None) -> float:
        """Read a number above 0 within float32's range with room for sums; required without a default."""
        value = self._take(key)
        if value is None:
            if default is None:
                raise self._missing(key)
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not TINIEST < value < LARGEST:
            raise self._wrong(key, "a number above 0 that float32 holds", value)
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Read a required list of numbers, each as in `number`."""
        values = self._take(key)
        if values is None:
            raise self._missing(key)
        if not isinstance(values, list) or len(values) != count:
            raise self._wrong(key, f"a list of {count} numbers", values)
        listed = ConfigReader({f"{key}[{index}]": value for index, value in enumerate(values)}, self._where)
        return tuple(listed.number(f"{key}[{index}]") for index in range(count))

    def integers(self, key: str, *, lowest: int = 0, highest: int) -> tuple[int, ...] | None:
        """Read a list of whole numbers from `lowest` to `highest`, or None if it is absent."""
        values = self._take(key)
        if values is None:
            return None
        if not isinstance(values, list) or not all(type(item) is int and lowest <= item <= highest for item in values):
            raise self._wrong(key, f"a list of integers from {lowest} to {highest}", values)
        return tuple(values)

    def flag(self, key: str, default: bool) -> bool:
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def flag_or(self, key: str, word: str | int) -> bool:
        """Read a flag for which the file may also contain a word or number, which means true. False if absent."""
        value = self._take(key)
        if value == word:
            return True
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, f"true, false or {word!r}", value)
        return bool(value)

    def text(self, key: str) -> str | None:
        """Read a string, or None if it is absent."""
        value = self._take(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def choice(self, key: str, allowed: Mapping[str, Choice], default: str) -> Choice:
        """Return the entry of `allowed` for the file's value."""
        value = self._take(key)
        if value is None:
            value = default
        if not isinstance(value, str) or value not in allowed:
            raise ModelError(f"{self._where}: {key} {value!r} is not supported (supported: {', '.join(allowed)})")
        return allowed[value]

    def names(self, key: str) -> tuple[str, ...] | None:
        """Read a list of strings, or None if it is absent."""
        value = self._take(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(value)

    def only(self, key: str, *served: object) -> None:
        """Raise ModelError for a value that is not supported. None among `values`: the key may be absent."""
        value = self._take(key)
        if value is None and None not in served:
            raise self._missing(key)
        if not any(value == one and type(value) is type(one) for one in served):
            supported = ", ".join(str(one) for one in served if one is not None)
            raise ModelError(f"{self._where}: {key} {value!r} is not supported (supported: {supported})")

    def inner(self, key: str) -> ConfigReader | None:
        """Return a reader of the object under the key, the same one each time; None if it is absent or empty. Its
        `done()` must be called too."""
        value = self._take(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        if key not in self._objects:
            inside = {name.removeprefix(f"{key}.") for name in self._allowed if name.startswith(f"{key}.")}
            self._allowed -= {f"{key}.{name}" for name in inside}  # its own done() reports them
            self._objects[key] = ConfigReader(value, f"{self._where}: {key}", inside, f"{self._path}{key}.")
        return self._objects[key]

    def mapping(self, key: str) -> Mapping[str, object]:
        """Return the object under the key as it is in the file; empty if there is none. It does not count as read."""
        value = self._values.get(key)
        return value if isinstance(value, Mapping) else {}

    def last(self, key: str) -> ConfigReader | None:
        """Like `inner`, for the last object of a list."""
        value = self._values.get(key)
        if isinstance(value, list) and value:
            self._values[key] = value[-1]
        return self.inner(key)

    def single(self, key: str) -> ConfigReader | None:
        """Like `inner`, for an object that may also be the only one of a list."""
        value = self._values.get(key)
        if isinstance(value, list) and len(value) == 1:
            self._values[key] = value[0]
        return self.inner(key)

    def objects(self, key: str) -> tuple[ConfigReader, ...]:
        """Return readers of the objects of a list, or of the one object under the key. Their other keys are ignored."""
        value = self._take(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, dict) for item in listed):
            raise self._wrong(key, "a list of objects", value)
        return tuple(ConfigReader(item, f"{self._where}: {key}[{index}]") for index, item in enumerate(listed))

    def require(self, key: str) -> ConfigReader:
        """Like `inner`, for a required object."""
        found = self.inner(key)
        if found is None:
            raise self._missing(key)
        return found

    def refuse(self, *keys: str) -> None:
        """Refuse flags that are on."""
        for key in keys:
            if self.flag(key, False):
                raise ModelError(f"{self._where}: {key} is not supported")

    def empty(self, *keys: str) -> None:
        """Refuse keys of any kind unless they are absent, false or empty."""
        for key in keys:
            if self._take(key) not in (None, False, "", {}, []):
                raise ModelError(f"{self._where}: {key} is not supported")

    def ignore(self, *keys: str) -> None:
        """Ignore keys that do not affect inference in this family."""
        self._taken.update(keys)

    def done(self) -> None:
        """Raise ModelError for keys that were not read, OptionError for allowed keys that are not in the file."""
        known = self._taken | HARMLESS | REFUSED.keys()
        known |= {key for key, value in self._values.items() if _is_harmless(key, value)}
        unknown = set(self._values) - known
        if missing := self._allowed - unknown:
            name = min(missing)
            why = "this program knows that key" if name in self._values else "there is no such key"
            raise OptionError(f"--allow-unknown-config: {self._path}{name}: {why} in {self._where}; omit it")
        if refused := sorted(unknown - self._allowed):
            options = " ".join(f"--allow-unknown-config {self._path}{name}" for name in refused)
            raise ModelError(
                f"{self._where}: unknown keys, which may mean another computation: {', '.join(refused)}; "
                f"if they do not, ignore them with {options}"
            )


def _listed(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _is_harmless(key: str, value: object) -> bool:
    """Whether an unknown key cannot change the computation, judging by its name or because it is off."""
    if HARMLESS_NAMES.fullmatch(key) or (key == "layer_types" and set(_listed(value)) == {"full_attention"}):
        return True
    is_addition = bool(ADDITIONS.fullmatch(key)) and not USUAL_PARTS & set(key.removesuffix("qk_norm").split("_"))
    if isinstance(value, bool) and HARMLESS_FLAGS.fullmatch(key):
        return True
    return value is False and (is_addition or key == "bias" or key.endswith("_bias"))


def describe_ignored_keys(keys: Iterable[str]) -> str:
    """The warning for --allow-unknown-config."""
    return f"config.json: ignored {', '.join(keys)}; if that changes the computation, answers are wrong"
