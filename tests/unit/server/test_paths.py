"""Paths that mean the same as another."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.serving import Served


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "///v1///models/", "/v1/models/", "/health/"])
def test_slashes_of_base_urls_are_ignored(served: Served, path: str) -> None:
    assert served.get(path).status == 200


@pytest.mark.parametrize("path", ["//v1//chat//completions", "/v2//models", "//health", "/v1/models//m"])
def test_other_slashes_count(served: Served, path: str) -> None:
    reply = served.get(path)
    assert reply.status == 404
    if path.endswith("//m"):
        assert "'/m'" in reply.json()["error"]["message"]  # type: ignore[index]


def test_a_doubled_slash_does_not_pass_the_key(serve: Callable[..., Served]) -> None:
    served = serve(options={"api_key": ("secret",)})
    for path in ("/v1//completions", "//v1/completions"):
        assert served.post(path, {"prompt": "x"}).status == 401
        assert served.post(path, {"prompt": "x"}, {"authorization": "Bearer secret"}).status == 200


def test_errors_name_no_class(served: Served) -> None:
    reply = served.chat(response_format=[])
    assert reply.json()["error"]["message"] == "response_format: Input should be a valid dictionary"  # type: ignore[index]
