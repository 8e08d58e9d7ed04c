"""The page at `/`: its files, its headers, and what can be told of it without a browser (tests/e2e/test_web_ui.py)."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import pytest

from serve_llm.server.http.auth import OPEN_PATHS
from serve_llm.server.routes.web_ui import PATHS
from support.serving import Served

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "server" / "web_ui"
FILES = {"/": "text/html", "/web_ui.js": "text/javascript", "/web_ui.css": "text/css"}
SCRIPT = (FOLDER / "web_ui.js").read_text(encoding="utf-8")
STYLE = (FOLDER / "web_ui.css").read_text(encoding="utf-8")


class Page(HTMLParser):
    """All elements, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed((FOLDER / "web_ui.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def values(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.elements if name in attributes]


def test_the_files(served: Served) -> None:
    assert set(PATHS) == set(FILES) <= OPEN_PATHS
    for path, kind in FILES.items():
        reply = served.get(path)
        assert reply.status == 200 and reply.headers["content-type"] == f"{kind}; charset=utf-8"
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert served.post("/", {}).status == 405


def test_the_policy_lets_nothing_in(served: Served) -> None:
    policy = served.get("/").headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'" and "unsafe" not in policy


def test_the_page_needs_no_other_server_and_nothing_inline(served: Served) -> None:
    page = Page()
    loaded = set(page.values("src") + page.values("href")) - {"data:,"}
    assert loaded == {"web_ui.js", "web_ui.css"}
    inline = [
        name for _, attributes in page.elements for name in attributes if name.startswith("on") or name == "style"
    ]
    assert inline == [] and all("src" in attributes for tag, attributes in page.elements if tag == "script")
    assert not re.search(r"https?:|//[a-z]", SCRIPT.replace("// ", "")) and not re.search(r"url\(|@import", STYLE)


def test_text_never_becomes_html() -> None:
    words = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|localStorage|cookie"
    )
    assert re.findall(words, SCRIPT) == []


def test_every_control_has_a_label_and_every_reference_a_target() -> None:
    page = Page()
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    references = page.values("for") + page.values("aria-labelledby") + page.values("aria-describedby")
    assert set(references) <= set(ids)
    controls = {
        attributes["id"] for tag, attributes in page.elements if tag in ("input", "select", "textarea", "meter")
    }
    assert controls <= set(page.values("for"))
    found = set(re.findall(r'(?:find|show)\("([\w-]+)"', SCRIPT)) | {"output-rate", "prompt-rate"}
    assert found <= set(ids)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_apart(scheme: str) -> None:
    """Contrasts that WCAG 2 asks for at level AA: 4.5 for text, 3 for borders."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", light if scheme == "light" else dark))
    assert len(colours) == 8
    pairs = [(text, under) for text in ("text", "muted", "problem", "accent") for under in ("background", "panel")]
    for one, other in [*pairs, ("on-accent", "accent")]:
        assert contrast(colours[one], colours[other]) >= 4.5, (one, other)
    assert min(contrast(colours["border"], colours[under]) for under in ("background", "panel")) >= 3


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_files_are_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = setuptools["package-data"]["serve_llm.server.web_ui"]
    assert "serve_llm.server.web_ui" in setuptools["packages"]
    names = [path.name for path in FOLDER.iterdir() if path.suffix not in (".py", "") and path.is_file()]
    assert len(names) == 3 and all(any(fnmatch(name, pattern) for pattern in patterns) for name in names)
