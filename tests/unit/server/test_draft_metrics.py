"""The counters of drafts, whose source is only known once an engine is ready."""

from __future__ import annotations

import msgspec

from support.serving import Served


def test_drafts_have_no_source_before_an_engine_is_ready(served: Served) -> None:
    """Otherwise, their counters would begin with the source "none", and later be other series."""
    served.engine.ready = False
    served.engine.facts = msgspec.structs.replace(served.engine.facts, draft_source="ngram")
    text = served.get("/metrics").content.decode()
    assert (
        "# TYPE serve_llm_spec_decode_num_drafts_total" in text
        and "\nserve_llm_spec_decode_num_drafts_total" not in text
    )
    served.engine.ready = True
    assert 'source="ngram"} 0.0' in served.get("/metrics").content.decode()
    served.engine.ready = False  # it is replaced
    assert 'source="ngram"} 0.0' in served.get("/metrics").content.decode()
