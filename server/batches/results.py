"""The results of one stored batch: an output file for answers, an error file for everything else."""

from __future__ import annotations

from serve_llm.server.batches.files import BatchOutput
from serve_llm.server.batches.objects import BatchUsage
from serve_llm.server.batches.progress import StoredProgress
from serve_llm.server.batches.store import BatchPaths


class BatchResults:
    """The two files, and what they hold."""

    def __init__(self, paths: BatchPaths, progress: StoredProgress) -> None:
        """progress: is kept up to date, except for the total of its counts. Raises OptionError."""
        self._output = BatchOutput(paths.output)
        try:
            self._errors = BatchOutput(paths.errors)
        except BaseException:
            self._output.close()
            raise
        self._progress = progress

    def read_ids(self) -> set[str]:
        """The custom_ids of all results. Raises OptionError."""
        self._progress.usage = BatchUsage()
        answered = self._output.read_ids(self._progress.count_tokens)
        failed = self._errors.read_ids()
        self._progress.counts.completed = len(answered)
        self._progress.counts.failed = len(failed)
        return answered | failed

    def write(self, line: bytes, status: int) -> None:
        """Raises ServeError."""
        if status < 400:
            self._output.append(line)
            self._progress.counts.completed += 1
            self._progress.count_tokens(line)
        else:
            self._errors.append(line)
            self._progress.counts.failed += 1

    def close(self) -> None:
        self._output.close()
        self._errors.close()
