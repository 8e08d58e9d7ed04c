"""Generate the table of docs/models.md: the parts of each model family, from the specs of the tests' checkpoints.

A part is described by the spec fields that differ from their defaults, so new fields and parts appear without a change
here. Refused keys are those that the family asks `ConfigReader` to refuse while it reads these config.json files.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import getfile
from pathlib import Path

from serve_llm.engine.model.config import REFUSED, Choice, ConfigReader
from serve_llm.engine.model.families.rope import KINDS
from serve_llm.engine.model.registry import FAMILIES
from serve_llm.engine.model.spec import ModelSpec

ROOT = Path(__file__).parent.parent
Feature = tuple[str, str]  # part, distinguishing label


class Reader(ConfigReader):
    """A config reader that records which keys and values the family refuses."""

    refused: dict[str, str]  # key -> supported values

    def refuse(self, *keys: str) -> None:
        self.refused |= dict.fromkeys(keys, "")
        super().refuse(*keys)

    def choice(self, key: str, allowed: Mapping[str, Choice], default: str) -> Choice:
        self.refused[key] = ", ".join(allowed)
        return super().choice(key, allowed, default)


@dataclass
class Family:
    """The features of one architecture across all its checkpoints."""

    refused: dict[str, str] = field(default_factory=dict)
    always: set[Feature] | None = None  # in every layer of every checkpoint
    features: list[Feature] = field(default_factory=list)  # in any layer or checkpoint, in order of appearance

    def add_checkpoint(self, architecture: str, config: Mapping[str, object]) -> None:
        reader = Reader(config)
        reader.refused = self.refused
        spec, _ = FAMILIES[architecture](reader)
        for features in layer_features(spec):
            self.features += [feature for feature in features if feature not in self.features]
            self.always = set(features) if self.always is None else self.always & set(features)

    def parts(self) -> str:
        """Return one line per part; features of only some layers or checkpoints are in parentheses."""
        lines = []
        for part in dict.fromkeys(part for part, _ in self.features):
            labels = [
                label if (part, label) in (self.always or ()) else f"({label})"
                for other, label in self.features
                if other == part and label
            ]
            lines.append(f"{part}: {', '.join(labels)}" if labels else part)
        return "<br>".join(lines)


def layer_features(spec: ModelSpec) -> Iterator[list[Feature]]:
    """Yield the features of each distinct layer, together with those of the whole model."""
    known = (to_words(spec.architecture), "final norm")  # the final norm is of the same kind as the layers' norms
    whole = [("model", label) for label in labels(spec) if not label.startswith(known)]
    for layer in dict.fromkeys(spec.layers):
        features: list[Feature] = [("norm position", to_words(layer.norm_position))]
        for part in (getattr(layer, each.name) for each in dataclasses.fields(layer)):
            if dataclasses.is_dataclass(part):
                name = to_words(type(part).__name__)
                features += [(name, ""), *((name, label) for label in labels(part))]
        yield features + whole


def labels(part: object, within: str = "") -> Iterator[str]:
    """Yield fields that differ from their defaults, and required string fields; sizes are omitted."""
    for each in dataclasses.fields(part):  # type: ignore[arg-type]
        value, name = getattr(part, each.name), within + to_words(each.name)
        has_default = each.default is not dataclasses.MISSING
        if (has_default and value == each.default) or value is False:
            if has_default and value != each.default:
                yield f"no {name}"
        elif isinstance(value, str):
            yield within + to_words(value)
        elif value is None:
            yield f"no {name}"
        elif dataclasses.is_dataclass(value):
            kind = to_words(type(value).__name__)
            title = within + (kind if to_words(each.name) in kind else to_words(each.name))  # yarn scaling; head norm
            yield title
            if not within:
                yield from labels(value, f"{title} ")
        elif has_default or value is True:
            yield name


def to_words(name: str) -> str:
    """Split a name into words: LinearScaling -> linear scaling, norm_eps -> norm, MoESpec -> moe."""
    name = name.removesuffix("Spec")
    return re.sub(r"(?<=[a-z0-9]{2})(?=[A-Z])", " ", name).removesuffix("_eps").replace("_", " ").lower()


def read_families() -> dict[str, Family]:
    """Read every architecture from the configs of the tests' checkpoints."""
    sys.path.insert(0, str(ROOT / "tests"))
    from parity.test_jina_bert import CONFIG as JINA_BERT
    from parity.test_jina_bert import QK_NORM_CONFIG as JINA_BERT_QK_NORM
    from parity.test_models import VARIANTS
    from unit.engine.model.test_encoder_configs import NEW

    from support.multimodal import TEXT, multimodal_config_of
    from support.pooled import DECODERS, ENCODERS, TOKEN_CLASSIFIERS, pooled_config_of
    from support.tiny import config_of

    families = {architecture: Family() for architecture in FAMILIES}
    for family, overrides in VARIANTS.values():
        config = config_of(family, **{key: value for key, value in overrides.items() if key != "std"})
        (architecture,) = config["architectures"]
        families[architecture].add_checkpoint(architecture, config)
    for architecture in (*DECODERS, *ENCODERS, *TOKEN_CLASSIFIERS):
        families[architecture].add_checkpoint(architecture, pooled_config_of(architecture))
    for architecture in TEXT:
        families[architecture].add_checkpoint(architecture, multimodal_config_of(architecture))
    mosaic = config_of("mpt") | {"architectures": ["MPTForCausalLM"]}  # MosaicML's spelling
    families["MPTForCausalLM"].add_checkpoint("MPTForCausalLM", mosaic)
    for architecture in ("NewModel", "NewForSequenceClassification"):  # transformers has no class with these names
        families[architecture].add_checkpoint(architecture, NEW | {"architectures": [architecture]})
    for architecture in ("JinaBertModel", "JinaBertForMaskedLM", "JinaBertForSequenceClassification"):
        families[architecture].add_checkpoint(architecture, JINA_BERT | {"architectures": [architecture]})
        families[architecture].add_checkpoint(architecture, JINA_BERT_QK_NORM | {"architectures": [architecture]})
    return families


def table() -> str:
    """Render one row per architecture."""
    families = read_families()
    from parity.test_expert_engines import ENGINE_GRIDS
    from parity.test_parallel import EXPERT_GRIDS, GRIDS

    ranks, whole, engines = (
        ", ".join(f"{first} x {second}" for first, second in sizes) for sizes in (GRIDS, EXPERT_GRIDS, ENGINE_GRIDS)
    )
    rows = [
        f"Tensor x pipeline parallel sizes that each is tested at: {ranks}; with whole experts on the ranks: {whole}; "
        f"data x tensor, with the experts spread over several engines: {engines}.",
        f"Kinds of rope scaling, where there is rope: {', '.join(KINDS)}.",
        f"Refused in every family unless off: {', '.join(f'`{key}`' for key in REFUSED)}.",
        "",
        "| Architecture | Parts | Served only when off, or only with these values |",
        "|---|---|---|",
    ]
    for architecture, family in sorted(families.items(), key=lambda item: item[0].lower()):
        path = Path(getfile(FAMILIES[architecture])).name
        file = f"[{path}](../engine/model/families/{path})"
        refused = "<br>".join(f"`{key}`{values and ': '}{values}" for key, values in sorted(family.refused.items()))
        rows.append(f"| {architecture}<br>{file} | {family.parts() or 'not tested'} | {refused} |")
    return "\n".join(rows)
