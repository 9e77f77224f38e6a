"""The data service: fetchers prepare the batches of registered loaders, and ranks request them.

docs/data.md shows the flow in one picture. The modules:

* in a rank: loader.py -> epoch.py -> client.py -> connection.py
* in a fetcher: server.py (one thread, no user code) -> scheduler.py -> worker.py -> dataset.py,
  order.py; generators.py: search for random generators in a dataset; definitions.py: the
  notebook's functions and classes, for the workers' `__main__`
* shared by both: protocol.py, encode.py, memory.py
* which rank gets which batch: sharding.py
* files in the run folder: service.py
* integration with accelerate: accelerated.py
"""
