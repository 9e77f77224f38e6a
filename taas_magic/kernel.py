"""The Jupyter kernel "Python (TaaS)": ipykernel with the extension switched on.

Started by kernels/taas/kernel.json as `python -m taas_magic.kernel -f <connection file>`.
"""

import os
import sys

# `python -m` puts the notebook's folder first; a random.py there would break the imports below.
# The kernel puts it back for the notebook itself.
if __name__ == "__main__" and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from ipykernel.kernelapp import IPKernelApp
from traitlets import List, Unicode


class TaasKernelApp(IPKernelApp):
    """ipykernel's application, with one more extension."""

    default_extensions = List(Unicode(), ["storemagic", "taas_magic"]).tag(config=True)


def main() -> None:
    """Runs a kernel until it is shut down."""
    TaasKernelApp.launch_instance()


if __name__ == "__main__":
    main()
