"""The function that a federation calls on each rank.

The kernel imports this module, because the kernel pickles the function as the name of a module and
a function. The import of the module `programs` would import most of Flower into the kernel.
Therefore only the function itself imports `programs`, when a rank calls the function.
"""

from typing import Any

from taas_magic.federation.flower import FederationSettings


def run_on_rank(settings: FederationSettings, server_app: Any, client_app: Any) -> Any:
    """Run Flower's programs on this rank's host until the ServerApp has ended.

    Args:
        settings: The settings of the federation.
        server_app: The notebook's ServerApp.
        client_app: The notebook's ClientApp.

    Returns:
        On rank 0, the return value of the ServerApp's main function. On any further rank, None.
    """
    from taas_magic.federation.programs import run_programs

    return run_programs(settings, server_app, client_app)
