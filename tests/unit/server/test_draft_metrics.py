"""The counters of drafts, whose source is only known once an engine is ready."""

from __future__ import annotations

import msgspec

from serve_llm.common.types import SchedulerStats
from support.serving import Served


def test_drafts_have_no_source_before_an_engine_is_ready(served: Served) -> None:
    """Otherwise, their counters would begin with the source "none", and later be other series."""
    served.engine.ready = False
    served.engine.model_info = msgspec.structs.replace(served.engine.model_info, draft_source="ngram")
    text = served.get("/metrics").content.decode()
    assert (
        "# TYPE serve_llm_spec_decode_num_drafts_total" in text
        and "\nserve_llm_spec_decode_num_drafts_total" not in text
    )
    served.engine.ready = True
    assert 'source="ngram"} 0.0' in served.get("/metrics").content.decode()
    served.engine.ready = False  # it is replaced
    assert 'source="ngram"} 0.0' in served.get("/metrics").content.decode()


def test_lookups_beside_a_draft_model_are_counted_apart(served: Served) -> None:
    served.engine.model_info = msgspec.structs.replace(served.engine.model_info, draft_source="draft_model")
    stats = SchedulerStats()
    stats.count_draft(4, 3)
    stats.count_draft(8, 8, is_looked_up=True)
    served.engine.stats = stats
    text = served.get("/metrics").content.decode()
    for name, of_model, of_texts in (("drafts", 1, 1), ("draft_tokens", 4, 8), ("accepted_tokens", 3, 8)):
        samples = [line for line in text.splitlines() if line.startswith(f"serve_llm_spec_decode_num_{name}_total")]
        assert len(samples) == 2
        assert samples[0].endswith(f'source="draft_model"}} {of_model}.0')
        assert samples[1].endswith(f'source="ngram"}} {of_texts}.0')
