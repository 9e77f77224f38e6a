"""What a rank finds imported: the agent imports it, forks the forkserver, and that forks ranks.

No CUDA context and no Python thread may come of it: forks would inherit the one broken and the
other not at all.
"""


# what a rank unpickles when it begins: its entry point, and through what torch calls it

import taas_magic.remote.fetcher
import taas_magic.remote.rank  # noqa: F401
