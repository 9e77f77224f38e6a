"""A remote loader against a local one: real fetcher processes, real sockets."""

import torch
from data_rig import SEED, Rows, plain, service
from torch.utils.data import DataLoader

from taas_magic.data.shard import seed_of


def local(loader, epoch=0):
    torch.manual_seed(seed_of(SEED, epoch))
    return [plain(batch) for batch in loader]


def test_one_rank_sees_the_local_stream(tmp_path):
    loader = DataLoader(Rows(50), 4, shuffle=True)
    with service(tmp_path, loader, fetchers=2) as running:
        remote = running.loader()
        assert [plain(batch) for batch in remote] == local(loader, 0)
        assert [plain(batch) for batch in remote] == local(loader, 1)
