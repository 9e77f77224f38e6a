"""The module `taas` for programs: the public names of taas-magic, see `taas_magic.api`.

This module is a file, not a folder. The other project named `taas` on PyPI (0.9.2) installs a
folder. So if a user installs both, pip overwrites no file of either.
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
