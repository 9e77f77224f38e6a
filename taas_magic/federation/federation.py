"""`taas.federation`: run Flower on a pool's hosts, with one rank on each host.

The code of this module runs in the notebook's kernel.
"""

import contextlib
import secrets
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from IPython.core.getipython import get_ipython

from taas_magic import certificate
from taas_magic.capture.work import VALUE, FunctionWork
from taas_magic.config import LOCAL
from taas_magic.engines.local import host_name
from taas_magic.errors import UsageError
from taas_magic.federation.flower import FederationSettings
from taas_magic.federation.rank import run_on_rank
from taas_magic.notebook import launch
from taas_magic.notebook.magic import TaasMagics
from taas_magic.plan import Flags


def federation(
    pool: str = "local",
    *,
    per_host: Mapping[str, Mapping[str, Any]] | None = None,
    hosts: int = 0,
    store: str = "",
) -> "Federation":
    """Return a federation: hosts of a pool that train a model together by Flower.

    This function starts nothing. It checks only the types of the arguments, and that `hosts` is not
    negative. `Federation.run` checks the arguments against taas.toml, and starts the training.

    Args:
        pool: Name of the pool whose hosts take part.
        per_host: Settings for the ClientApp on each host, by the host's name. The ClientApp gets
            them as `context.node_config`. The settings of a host are a dict with strings, numbers
            and booleans, such as the path of the host's data.
        hosts: Number of hosts; 0 for all hosts of the pool.
        store: Path of the run's project store: the folder to which the ServerApp writes. A host
            that does not share this folder receives a copy. If `store` is "", the project store is
            an empty temporary folder, which is removed after the run.

    Returns:
        The federation, whose method `run` runs Flower's apps.

    Raises:
        UsageError: An argument has a wrong type, or `hosts` is negative.
    """
    given = per_host or {}
    is_by_host = isinstance(given, Mapping) and all(isinstance(v, Mapping) for v in given.values())
    is_count = isinstance(hosts, int) and hosts >= 0
    if not isinstance(pool, str) or not is_count or not is_by_host:
        raise UsageError(
            "taas.federation: pool needs the name of a pool, hosts a number that is at least 0, "
            "and per_host a dict for each host's name; "
            f"got pool={pool!r}, hosts={hosts!r}, per_host={per_host!r}"
        )
    return Federation(pool, given, hosts, store)


@dataclass(frozen=True)
class Federation:
    """Hosts of a pool that train a model together by Flower. Created by `taas.federation`.

    Attributes:
        pool: Name of the pool.
        per_host: Settings for the ClientApp on each host, by the host's name.
        hosts: Number of hosts; 0 for all hosts of the pool.
        store: Path of the run's project store; "" for a temporary folder.
    """

    pool: str
    per_host: Mapping[str, Mapping[str, Any]]
    hosts: int
    store: str

    def run(
        self,
        server_app: Any,
        client_app: Any,
        config: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Run a ServerApp and a ClientApp of the notebook on the hosts, and wait for the run's end.

        First check the arguments, and make a certificate and a key for this run. The notebook shows
        the run like the run of a cell. The run's project store is not the notebook's folder, but
        the federation's `store`, or a temporary folder that is removed after the run.

        If the first host is lost, the run ends. If any other host is lost before the ranks of all
        hosts have started, the run ends, too. If it is lost later, the run continues without this
        host. Flower's settings, such as `min_available_nodes`, then decide whether the training
        continues.

        Args:
            server_app: A Flower `ServerApp`, which runs on the first host.
            client_app: A Flower `ClientApp`, which runs on every host.
            config: Settings for both apps: strings, numbers and booleans by name. The apps get them
                as `context.run_config`.
            timeout: Seconds after which taas-magic ends the run; None for no limit.

        Returns:
            The return value of the ServerApp's main function, such as Flower's `Result`.

        Raises:
            UsageError: An argument is wrong: the pool does not exist or has too few hosts,
                `per_host` names a host that is not in the pool, or a value of `config` or
                `per_host` is not a string, number or boolean. Also if no notebook has loaded the
                extension.
            TaasError: The run failed, for example because flwr is not installed on a host. The
                class is the same as for a failed `%%taas` cell.
        """
        _check_values(config or {}, *self.per_host.values())
        magics = _magics()
        settings = magics.settings()
        pool = settings.pool(self.pool)
        names: Collection[str] = pool.hosts or self.per_host
        if pool.engine == LOCAL:
            names = [host_name(pool, number) for number in range(pool.max_hosts)]
        if unknown := sorted(set(self.per_host) - set(names)):
            raise UsageError(
                f'per_host names {", ".join(unknown)}; the hosts of pool "{pool.name}" are '
                f"{', '.join(names)}"
            )
        pair = certificate.make_self_signed("taas-magic federation")
        federation_settings = FederationSettings(
            *pair, secrets.token_urlsafe(32), self.per_host, config or {}
        )
        work = FunctionWork(
            run_on_rank, (federation_settings, server_app, client_app), raw="taas.federation(...)"
        )
        made = contextlib.nullcontext(self.store)
        folder = made if self.store else tempfile.TemporaryDirectory(prefix="taas-federation-")
        with folder as store:
            flags = Flags(
                gpus=self.hosts or pool.max_hosts,
                pool=self.pool,
                out=(VALUE,),
                name="federation",
                timeout_s=timeout,
                store=store,
                federated=True,
            )
            return launch.execute(flags, work, magics.shell, settings).result


def _check_values(*values: Mapping[str, Any]) -> None:
    """Check that Flower can transfer the values of `config` and `per_host`.

    Args:
        values: The dict `config`, and the dict of each host in `per_host`.

    Raises:
        UsageError: A value is not a string, number or boolean.
    """
    for name, value in (item for each in values for item in each.items()):
        if not isinstance(value, str | bool | int | float):
            raise UsageError(
                f"config and per_host can contain strings, numbers and booleans; got a "
                f"{type(value).__name__} for {name!r}"
            )


def _magics() -> TaasMagics:
    """Return the object that holds the magics of the notebook's extension taas-magic.

    Raises:
        UsageError: There is no notebook, or it has not loaded the extension.
    """
    shell = get_ipython()
    magics = shell and shell.magics_manager.registry.get("TaasMagics")
    if not magics:
        raise UsageError("taas.federation needs a notebook: %load_ext taas_magic first")
    assert isinstance(magics, TaasMagics)
    return magics
