"""The data service: fetchers prepare the batches of registered loaders, ranks pull them."""
