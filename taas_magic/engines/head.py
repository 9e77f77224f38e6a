"""The Dask scheduler of a pool."""

from typing import Any

from distributed import Scheduler


class HeadScheduler(Scheduler):
    """A scheduler without web pages: they would listen on a port that asks nobody for a key."""

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Opens no port."""
