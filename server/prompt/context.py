"""What the jobs of `prompt.jobs` need besides a body, and how they request a worker process."""

from __future__ import annotations

from typing import NamedTuple

from serve_llm.common.options.limits import Limits
from serve_llm.common.types import ModelInfo
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.schema.common import Body, parse_by_policy
from serve_llm.server.structured_output.compiler import GrammarCompiler
from serve_llm.server.structured_output.turn_form import GrammarSource, compute_key


class NeedsWorker(Exception):
    """The job must run in a worker process, which can be killed."""


class GrammarNeeded(NeedsWorker):
    """A grammar that has not been compiled yet."""

    def __init__(self, source: GrammarSource) -> None:
        super().__init__()
        self.source = source


class JobContext(NamedTuple):
    model: ServedModel
    model_info: ModelInfo
    limits: Limits
    trusts_templates: bool = False  # requests may contain chat templates
    is_worker: bool = False  # the job runs in a worker process
    ignores_unknown_fields: bool = False  # in bodies read by `parse_openai_body`
    grammars: GrammarCompiler | None = None  # only workers compile; the server uses its cache

    def find_grammar(self, source: GrammarSource) -> str:
        """The compiled grammar. Raises InvalidRequest, GrammarNeeded."""
        assert self.grammars is not None
        if self.is_worker:
            return self.grammars.compile(source)
        found = self.grammars.cache.get(compute_key(source))
        if found is None:
            raise GrammarNeeded(source)
        return found.unwrap()


def parse_openai_body(kind: type[Body], content: bytes, context: JobContext) -> tuple[Body, list[str]]:
    """`parse_by_policy` with the server's policy. Raises InvalidRequest, TooLarge."""
    return parse_by_policy(kind, content, context.limits, ignores_unknown=context.ignores_unknown_fields)
