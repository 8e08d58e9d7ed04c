"""serve-llm scale uses an administrator's key, waits, and names failures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_llm.cli import scale
from serve_llm.cli.api_client import ApiClient, ApiError
from serve_llm.common.errors import OptionError
from support.scripted_api import ScriptedApi, serve_script


def scaling(**changed: object) -> dict[str, object]:
    return {"num_engines": 3, "target": 3, "is_under_way": False, "error": None} | changed


def engine(**changed: object) -> dict[str, object]:
    return {"ready": True, "draining": False, "num_running": 0, "num_waiting": 0} | changed


def show(api: ScriptedApi, engines: list[Any], **changed: object) -> None:
    """Set the answer of /status from now on."""
    api.texts["/status"] = json.dumps({"engines": engines, "scaling": scaling(**changed)})


def test_it_waits_until_the_engines_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_script([(200, scaling(is_under_way=True))]) as api:
        show(api, [engine()], is_under_way=True)
        scale.scale(ApiClient(api.url), 3, 5.0, lambda seconds: show(api, [engine()] * 3))
        assert api.bodies == [{"data_parallel_size": 3, "drain_timeout": 5.0}]
    assert capsys.readouterr().out == "1 ready, 2 starting\n3 ready\n3 engines serve\n"


def test_what_drains_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_script([(200, scaling(is_under_way=True))]) as api:
        show(api, [engine(), engine(ready=False, draining=True, num_running=1)], num_engines=2, is_under_way=True)
        scale.scale(ApiClient(api.url), 1, None, lambda seconds: show(api, [engine()], num_engines=1))
        assert api.bodies == [{"data_parallel_size": 1}]
    assert capsys.readouterr().out.splitlines() == [
        "1 ready, engine 1 draining (1 request)",
        "1 ready",
        "1 engine serves",
    ]


def test_failures_are_told() -> None:
    with serve_script([(200, scaling(num_engines=1, error="no GPU is left"))]) as api:
        with pytest.raises(scale.ScalingFailed, match=r"^1 engine serves, as before: no GPU is left$"):
            scale.scale(ApiClient(api.url), 2)
    error = {"error": {"message": "4 is not between 1 and 3"}}
    with serve_script([(400, error)]) as api, pytest.raises(ApiError, match="4 is not between 1 and 3"):
        scale.scale(ApiClient(api.url), 4)
    with pytest.raises(OptionError, match="--data-parallel-size: expected a number of at least 1"):
        scale.main(["--data-parallel-size", "0"], {})


@pytest.mark.parametrize(("keys", "sent"), [("a,admin:b", "admin:b"), ("a", "a")])
def test_of_several_keys_the_administrators_is_sent(keys: str, sent: str) -> None:
    with serve_script([(200, scaling(is_under_way=True))]) as api:
        show(api, [engine()])
        assert scale.main(["--data-parallel-size", "3", api.url], {"SERVE_LLM_API_KEY": keys}) == 0
        assert api.keys == [f"Bearer {sent}"]
