"""A printable tree of the named parts of a model on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ModelTree:
    """A named part, what it is, and the parts inside it. `str` renders the tree, like `repr` of a torch module."""

    description: str = ""
    children: dict[str, ModelTree] = field(default_factory=dict)

    def add(self, name: str, description: str) -> None:
        """name: dotted, such as "layers.0.attention"; "" is the root. Parts may be added in any order."""
        node = self
        for key in name.split(".") if name else ():
            node = node.children.setdefault(key, ModelTree())
        node.description = description

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """One line per part. Consecutive numbered parts that look the same share their lines."""
        groups: list[tuple[list[str], list[str]]] = []  # names, lines
        for name, child in self.children.items():
            lines = child.lines()
            if groups and name.isdigit() and groups[-1][0][-1].isdigit() and groups[-1][1] == lines:
                groups[-1][0].append(name)
            else:
                groups.append(([name], lines))
        result = [self.description]
        for names, (first, *inner) in groups:
            label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
            count = "" if len(names) == 1 else f"{len(names)} x "
            result.append(f"  ({label}): {count}{first}".rstrip())
            result += [f"  {line}" for line in inner]
        return result
