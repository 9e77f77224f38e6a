"""The data service: fetchers prepare the batches of registered loaders, ranks pull them.

docs/data.md has the flow in one picture. In a rank: loader.py -> epoch.py -> client.py ->
connection.py. In a fetcher: server.py (one thread, no user code) -> scheduler.py -> worker.py ->
dataset.py, order.py. Between them: protocol.py, encode.py, memory.py. Arithmetic: sharding.py.
On disk: service.py. accelerate: accelerated.py.
"""
