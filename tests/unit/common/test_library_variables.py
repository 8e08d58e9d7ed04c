"""Environment variables that a new process gets unless they are set."""

from __future__ import annotations

from serve_llm.common.library_variables import set_library_defaults


def test_what_a_user_has_set_stays() -> None:
    environ = {"TORCH_CPP_LOG_LEVEL": "INFO"}
    set_library_defaults(environ)
    assert environ["TORCH_CPP_LOG_LEVEL"] == "INFO" and environ["MKL_CBWR"] == "AUTO,STRICT"
    environ = {}
    set_library_defaults(environ)
    assert environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
