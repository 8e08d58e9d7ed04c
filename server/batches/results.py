"""The results of one stored batch: an output file for answers, an error file for everything else."""

from __future__ import annotations

from serve_llm.server.batches.files import BatchOutput
from serve_llm.server.batches.objects import RequestCounts
from serve_llm.server.batches.store import BatchPaths


class BatchResults:
    """The two files, and how many results they hold."""

    def __init__(self, paths: BatchPaths, counts: RequestCounts) -> None:
        """counts: is kept up to date, except for its total. Raises OptionError."""
        self._output = BatchOutput(paths.output)
        try:
            self._errors = BatchOutput(paths.errors)
        except BaseException:
            self._output.close()
            raise
        self.counts = counts

    def read_ids(self) -> set[str]:
        """The custom_ids of all results. Raises OptionError."""
        answered = self._output.read_ids()
        failed = self._errors.read_ids()
        self.counts.completed = len(answered)
        self.counts.failed = len(failed)
        return answered | failed

    def write(self, line: bytes, status: int) -> None:
        """Raises ServeError."""
        if status < 400:
            self._output.append(line)
            self.counts.completed += 1
        else:
            self._errors.append(line)
            self.counts.failed += 1

    def close(self) -> None:
        self._output.close()
        self._errors.close()
