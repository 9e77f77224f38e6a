"""The Jupyter kernel "Python (TaaS)": ipykernel with the extension switched on.

Started by kernels/taas/kernel.json as `python -m taas_magic.kernel -f <connection file>`.
"""

import os
import sys
from typing import Any

# `python -m` puts the notebook's folder first; a random.py there would break the imports below.
# The kernel puts it back for the notebook itself.
if __name__ == "__main__" and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

import ipykernel
from ipykernel.kernelapp import IPKernelApp
from traitlets import List, Unicode

ENCRYPTS_FROM = (7, 3)
"""The first ipykernel that encrypts. An older one never answers a frontend that asks for it."""


EXTENSION = "taas_magic"


class TaasKernelApp(IPKernelApp):
    """ipykernel's application, with one more extension."""

    default_extensions = List(Unicode(), ["storemagic", EXTENSION]).tag(config=True)

    def init_extensions(self) -> None:
        """Load the extensions; a `%load_ext` of ours, as notebooks have it, then says nothing."""
        super().init_extensions()
        self.shell.extension_manager.loaded.discard(EXTENSION)

    def load_connection_info(self, info: dict[str, Any]) -> None:
        """Take the ports and keys that the frontend chose.

        Raises:
            SystemExit: The frontend wants to encrypt, and this ipykernel cannot.
        """
        if "curve_secretkey" in info and ipykernel.version_info < ENCRYPTS_FROM:
            sys.exit(
                f"the frontend encrypts its messages, which ipykernel {ipykernel.__version__} "
                "cannot read: install ipykernel 7.3 or newer, or set "
                "KernelManager.transport_encryption to 'disabled'"
            )
        super().load_connection_info(info)


def main() -> None:
    """Run a kernel until it is shut down."""
    TaasKernelApp.launch_instance()


if __name__ == "__main__":
    main()
