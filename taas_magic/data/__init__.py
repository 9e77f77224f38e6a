"""The data service: fetchers prepare the batches of registered loaders, and ranks request them.

docs/data.md shows the flow in one picture. The modules (`a -> b` means that a uses b):

* In a rank: loader.py -> epoch.py -> client.py -> connection.py. other_ranks.py agrees with other
  ranks on an order, and compares the data of the ranks.
* In a fetcher: server.py -> scheduler.py -> worker.py -> dataset.py, order.py. The server has one
  thread and runs no user code; the workers run the dataset.
* Used by the workers: generators.py finds random generators in a dataset. definitions.py adds the
  notebook's functions and classes to `__main__`.
* Used by ranks and fetchers: protocol.py, encode.py, memory.py.
* sharding.py decides which rank gets which batch.
* service.py reads and writes the files in the run folder.
* watchdog.py kills processes that SIGSTOP has suspended for too long. Agents use it, too.
* accelerated.py integrates registered loaders with accelerate.
"""
