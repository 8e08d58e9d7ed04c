"""The generated table of docs/models.md: what each family is made of, by the specs of the tests' own checkpoints.

A part is described by the fields of its spec that differ from their defaults, so a new field or a new part shows up by
itself. What is refused is what the family file asks `Config` to refuse while it reads the config.json of these.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import getfile
from pathlib import Path

from serve_llm.engine.model.config import REFUSED, Choice, Config
from serve_llm.engine.model.families.rope import KINDS
from serve_llm.engine.model.registry import FAMILIES
from serve_llm.engine.model.spec import ModelSpec

ROOT = Path(__file__).parent.parent
Feature = tuple[str, str]  # part, what distinguishes it


class Reader(Config):
    """A config that takes note of what the family asks of it."""

    refused: dict[str, str]  # key -> what of it is served

    def refuse(self, *keys: str) -> None:
        self.refused |= dict.fromkeys(keys, "")
        super().refuse(*keys)

    def choice(self, key: str, allowed: Mapping[str, Choice], default: str) -> Choice:
        self.refused[key] = ", ".join(allowed)
        return super().choice(key, allowed, default)


@dataclass
class Family:
    """What was seen of one architecture."""

    refused: dict[str, str] = field(default_factory=dict)
    always: set[Feature] | None = None  # in every layer of every checkpoint
    features: list[Feature] = field(default_factory=list)  # of any, in the order of their first appearance

    def see(self, architecture: str, config: Mapping[str, object]) -> None:
        reader = Reader(config)
        reader.refused = self.refused
        spec, _ = FAMILIES[architecture](reader)
        for found in kinds(spec):
            self.features += [feature for feature in found if feature not in self.features]
            self.always = set(found) if self.always is None else self.always & set(found)

    def parts(self) -> str:
        """Part by part, what only some layers or checkpoints have in parentheses."""
        lines = []
        for part in dict.fromkeys(part for part, _ in self.features):
            labels = [
                label if (part, label) in (self.always or ()) else f"({label})"
                for other, label in self.features
                if other == part and label
            ]
            lines.append(f"{part}: {', '.join(labels)}" if labels else part)
        return "<br>".join(lines)


def kinds(spec: ModelSpec) -> Iterator[list[Feature]]:
    """The features of each kind of layer, those of the whole model with each."""
    known = (words(spec.architecture), "final norm")  # which is of the layers' kind
    whole = [("model", label) for label in labels(spec) if not label.startswith(known)]
    for layer in dict.fromkeys(spec.layers):
        found: list[Feature] = [("halves", words(layer.placement))]
        for part in (getattr(layer, each.name) for each in dataclasses.fields(layer)):
            if dataclasses.is_dataclass(part):
                name = words(type(part).__name__)
                found += [(name, ""), *((name, label) for label in labels(part))]
        yield found + whole


def labels(part: object, within: str = "") -> Iterator[str]:
    """Fields that differ from their defaults, and required ones that are words; sizes are left out."""
    for each in dataclasses.fields(part):  # type: ignore[arg-type]
        value, name = getattr(part, each.name), within + words(each.name)
        has_default = each.default is not dataclasses.MISSING
        if (has_default and value == each.default) or value is False:
            if has_default and value != each.default:
                yield f"no {name}"
        elif isinstance(value, str):
            yield within + words(value)
        elif value is None:
            yield f"no {name}"
        elif dataclasses.is_dataclass(value):
            kind = words(type(value).__name__)
            own = within + (kind if words(each.name) in kind else words(each.name))  # yarn scaling; head norm
            yield own
            if not within:
                yield from labels(value, f"{own} ")
        elif has_default or value is True:
            yield name


def words(name: str) -> str:
    """LinearScaling -> linear scaling, head_norm_eps -> head norm, MoE -> moe."""
    return re.sub(r"(?<=[a-z0-9]{2})(?=[A-Z])", " ", name).removesuffix("_eps").replace("_", " ").lower()


def seen() -> dict[str, Family]:
    """Every architecture, by the configs of the tests' checkpoints."""
    sys.path.insert(0, str(ROOT / "tests"))
    from parity.test_models import VARIANTS

    from support.tiny import config_of

    families = {architecture: Family() for architecture in FAMILIES}
    for family, overrides in VARIANTS.values():
        config = config_of(family, **{key: value for key, value in overrides.items() if key != "std"})
        (architecture,) = config["architectures"]
        families[architecture].see(architecture, config)
    return families


def table() -> str:
    """One row per architecture."""
    families = seen()
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
