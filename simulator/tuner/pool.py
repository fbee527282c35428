"""Who does the jobs of a tune: this process, several on this machine, or a Dask cluster; all with the same results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from foreload.errors import UsageError
from foreload.simulator.tuner.jobs import Context, Done, Job, job_key, perform
from foreload.simulator.tuner.journal import Journal

Backend = Literal["local", "dask"]
Progress = Callable[[int, int, str], None]


class Pool:
    """Does jobs in order of their list, and keeps what is finished in a journal, if there is one."""

    def __init__(
        self,
        context: Context,
        jobs: int = 1,
        backend: Backend = "local",
        address: str | None = None,
        journal: Journal | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`jobs` processes of this machine, or every worker of the Dask scheduler at `address`.

        UsageError if what was asked for does not go together, or the scheduler does not answer.
        """
        if jobs < 1:
            raise UsageError(f"--jobs {jobs}: 1 or more is needed")
        if (backend == "dask") != (address is not None):
            raise UsageError("--backend dask and --address go together: give both or none")
        if backend == "dask" and jobs != 1:
            raise UsageError("--jobs counts processes of this machine: a Dask cluster uses all of its workers")
        self.context, self._jobs, self._journal = context, jobs, journal
        self._progress = progress or (lambda done, total, what: None)
        self._client = _connect(address) if address is not None else None
        self._earlier = set() if journal is None else journal.keys()
        self._reused: set[str] = set()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()

    @property
    def reused(self) -> int:
        """Results of an earlier run that were used."""
        return len(self._reused)

    def map(self, jobs: Sequence[Job], what: str) -> list[Done]:
        """Results in the order of `jobs`; equal jobs are done once."""
        keys = [job_key(self.context, job) for job in jobs]
        wanted = dict(zip(keys, jobs, strict=True))
        found: dict[str, Done] = {}
        if self._journal is not None:
            kept = {key: self._journal.get(key) for key in wanted}
            found = {key: done for key, done in kept.items() if done is not None}
            self._reused |= self._earlier & found.keys()
        todo = [key for key in wanted if key not in found]
        self._progress(len(found), len(wanted), what)
        for key, done in zip(todo, self._perform([wanted[key] for key in todo]), strict=True):
            found[key] = done
            if self._journal is not None:
                self._journal.put(key, done)
            self._progress(len(found), len(wanted), what)
        return [found[key] for key in keys]

    def _perform(self, jobs: Sequence[Job]) -> Iterator[Done]:
        if (self._jobs == 1 and self._client is None) or not jobs:
            yield from (perform(self.context, job) for job in jobs)
            return
        from joblib import Parallel, delayed

        with self._workers():
            yield from Parallel(return_as="generator")(delayed(perform)(self.context, job) for job in jobs)

    def _workers(self) -> AbstractContextManager[Any]:
        from joblib import parallel_config

        if self._client is None:
            local: AbstractContextManager[Any] = parallel_config("loky", n_jobs=self._jobs)
            return local
        cluster: AbstractContextManager[Any] = parallel_config("dask", client=self._client)
        return cluster


def _connect(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError("--backend dask needs the package distributed: pip install 'dask[distributed]'") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Client(address, timeout=10, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(f"--address {address}: no Dask scheduler answers there: {type(error).__name__}") from error
