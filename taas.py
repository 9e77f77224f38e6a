"""`import taas` in a program of its own: the public names of taas-magic, see `taas_magic.api`.

One file, not a package: PyPI's `taas` 0.9.2 is a package, so pip overwrites nothing of either.
"""

from typing import TYPE_CHECKING

from taas_magic.capture.modules import claim_taas

if TYPE_CHECKING:
    from taas_magic.api import *  # noqa: F403
    from taas_magic.api import (
        get_registered_data_loaders_names as get_registered_data_loaders_names,
    )
    from taas_magic.api import get_worker_info as get_worker_info
    from taas_magic.api import unregistered as unregistered

claim_taas()
