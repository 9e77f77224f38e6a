"""`taas.federation`: Flower on a pool's hosts, as a run with one rank a host (kernel)."""

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from IPython.core.getipython import get_ipython

from taas_magic import certificate
from taas_magic.capture.payload import Cell
from taas_magic.errors import UsageError
from taas_magic.federation.flower import CLIENT_APP, SERVER_APP, Terms
from taas_magic.notebook import launch
from taas_magic.notebook.magic import TaasMagics
from taas_magic.plan import Flags

TERMS, OUT = "taas_federation_terms", "taas_federation_result"

SOURCE = f"""import flwr
from taas_magic.federation.member import take_part
{OUT} = take_part({TERMS}, {SERVER_APP}, {CLIENT_APP})
"""
"""The cell that the ranks run."""


@dataclass(frozen=True)
class Federation:
    """Hosts that learn together, each from data of its own.

    Attributes:
        pool: The pool whose hosts take part.
        per_host: What the ClientApp finds in `context.node_config`, by the host's name: texts,
            numbers and truth values, such as where its data lies.
        hosts: How many take part; 0: all of the pool.
        store: A folder that the ServerApp writes to; what is in it goes to all hosts. "": an empty
            one, which is removed.
    """

    pool: str = "local"
    per_host: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hosts: int = 0
    store: str = ""

    def run(
        self,
        server_app: Any,
        client_app: Any,
        config: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Run a ServerApp and a ClientApp of the notebook; blocks, and shows the run as a cell's.

        Args:
            server_app: Runs on the first host. A host that is lost besides does not end the run:
                what becomes of its client is Flower's to say (`min_available_nodes`, ...).
            client_app: Runs on every host.
            config: What both find in `context.run_config`.
            timeout_s: Bound on the run's time.

        Returns:
            What the ServerApp's main returned, such as Flower's `Result`.

        Raises:
            UsageError: The pool has no such hosts, flwr is not installed, or Flower cannot pass a
                value of `config` or `per_host` on.
            TaasError: As a `%%taas` cell raises.
        """
        _check(config or {}, *self.per_host.values())
        magics = _magics()
        settings = magics.settings()
        pool = settings.pool(self.pool)
        if unknown := sorted(set(self.per_host) - set(pool.hosts or self.per_host)):
            raise UsageError(
                f'per_host names {", ".join(unknown)}; the hosts of pool "{pool.name}" are '
                f"{', '.join(pool.hosts)}"
            )
        pair = certificate.make("taas-magic federation")
        terms = Terms(*pair, secrets.token_urlsafe(32), self.per_host, config or {})
        names = {TERMS: terms, SERVER_APP: server_app, CLIENT_APP: client_app}
        made = contextlib.nullcontext(self.store)
        folder = made if self.store else tempfile.TemporaryDirectory(prefix="taas-federation-")
        with _bound(magics.shell.user_ns, names), folder as store:
            flags = Flags(
                gpus=self.hosts or pool.max_hosts,
                pool=self.pool,
                out=(OUT,),
                name="federation",
                timeout_s=timeout_s,
                store=store,
                federated=True,
            )
            cell = Cell(SOURCE, "<taas.federation>", SOURCE)
            return launch.execute(flags, cell, magics.shell, settings).out[OUT]


def _check(*said: Mapping[str, Any]) -> None:
    """Check what apps are told.

    Raises:
        UsageError: A value is no text, no number and no truth value.
    """
    for name, value in (item for each in said for item in each.items()):
        if not isinstance(value, str | bool | int | float):
            raise UsageError(
                f"config and per_host have texts, numbers and truth values; got a "
                f"{type(value).__name__} for {name!r}"
            )


def _magics() -> TaasMagics:
    """Return the notebook's.

    Raises:
        UsageError: There is no notebook, or the extension is not loaded.
    """
    shell = get_ipython()
    magics = shell and shell.magics_manager.registry.get("TaasMagics")
    if not magics:
        raise UsageError("taas.federation needs a notebook: %load_ext taas_magic first")
    assert isinstance(magics, TaasMagics)
    return magics


@contextlib.contextmanager
def _bound(namespace: dict[str, Any], names: Mapping[str, Any]) -> Iterator[None]:
    """Have names in the notebook for the time of a run: what travels is found by its name."""
    namespace.update(names)
    try:
        yield
    finally:
        for name in (*names, OUT):
            namespace.pop(name, None)
