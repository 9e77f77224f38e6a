"""The Jupyter kernel "Python (TaaS)": an ipykernel that loads the `taas_magic` extension at start.

The file kernels/taas/kernel.json tells Jupyter to start the kernel with this command:
`python -m taas_magic.kernel -f <connection file>`.
"""

import os
import sys
from typing import Any

# `python -m` puts the notebook's folder first in sys.path; a file random.py there would break the
# imports below. ipykernel adds the folder again for the notebook itself.
if __name__ == "__main__" and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

import ipykernel
from ipykernel.kernelapp import IPKernelApp
from traitlets import List, Unicode

ENCRYPTS_FROM = (7, 3)
"""First version of ipykernel that can encrypt its connection to the frontend.

An older ipykernel never answers a frontend that requests encryption.
"""


EXTENSION = "taas_magic"


class TaasKernelApp(IPKernelApp):
    """ipykernel's application that also loads the `taas_magic` extension."""

    default_extensions = List(Unicode(), ["storemagic", EXTENSION]).tag(config=True)

    def init_extensions(self) -> None:
        """Load the extensions, then mark `taas_magic` as not loaded.

        Without the mark, the notebook's line `%load_ext taas_magic` would print that the extension
        is already loaded.
        """
        super().init_extensions()
        self.shell.extension_manager.loaded.discard(EXTENSION)

    def load_connection_info(self, info: dict[str, Any]) -> None:
        """Load the ports and keys that the frontend chose.

        Raises:
            SystemExit: The frontend requests encryption, and this ipykernel does not support it.
        """
        if "curve_secretkey" in info and ipykernel.version_info < ENCRYPTS_FROM:
            sys.exit(
                f"the frontend encrypts its messages, which ipykernel {ipykernel.__version__} "
                "cannot read: install ipykernel 7.3 or newer, or set "
                "KernelManager.transport_encryption to 'disabled'"
            )
        super().load_connection_info(info)


def main() -> None:
    """Run the kernel until it is shut down."""
    TaasKernelApp.launch_instance()


if __name__ == "__main__":
    main()
