"""taas.toml: where it is found, what it gives, and the line that each mistake gets."""

from pathlib import Path

import pytest

from taas_magic import taas_toml
from taas_magic.config import Config, DataConfig, PoolConfig
from taas_magic.errors import UsageError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    (path / "project" / "deep").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(path))
    return path


def loaded(home: Path, text: str) -> Config:
    (home / "taas.toml").write_text(text)
    return taas_toml.load(home / "project")


def test_without_a_file_everything_is_local(home: Path) -> None:
    assert taas_toml.load(home / "project") == Config()
    assert set(Config().pools) == {"local"}


def test_the_nearest_file_holds(home: Path) -> None:
    for folder in (home, home / "project"):
        (folder / "taas.toml").write_text("")
    assert taas_toml.find(home / "project" / "deep") == home / "project" / "taas.toml"
    assert taas_toml.find(home) == home / "taas.toml"


def test_above_the_home_folder_nothing_is_looked_for(home: Path) -> None:
    (home.parent / "taas.toml").write_text("")
    assert taas_toml.find(home / "project") is None


def test_the_users_own_file_is_the_last_resort(home: Path, tmp_path: Path) -> None:
    user = tmp_path / "config" / "taas" / "taas.toml"
    user.parent.mkdir(parents=True)
    user.write_text("")
    assert taas_toml.find(home / "project") == user


def test_all_keys(home: Path) -> None:
    text = """
    [store]
    path = "data"
    limit = "2GB"
    [data]
    buffer = "2GiB"
    rank_buffer = "64MiB"
    over = "spill"
    spill = "100GB"
    [capture]
    limit = "500MB"
    [runs]
    keep = 3
    keep_size = "2GiB"
    [pools."g2.8"]
    engine = "ssh"
    hosts = ["a", "b"]
    gpus = 8
    cores = 64
    role = "data"
    interface = "ib0"
    network = "private"
    python = "/opt/bin/python"
    idle_timeout_s = 60
    lease_s = 5
    start_timeout_s = 30.5
    [pools."g2.8".options]
    user = "me"
    [pools.batch]
    engine = "dask_jobqueue.SLURMCluster"
    max_hosts = 4
    """
    found = loaded(home, text)
    assert (found.store_path, found.source) == (home / "data", home / "taas.toml")
    assert found.store_limit_bytes == 2_000_000_000
    assert found.data == DataConfig(2 << 30, 64 << 20, "spill", 100_000_000_000)
    assert found.capture_limit_bytes == 500_000_000
    assert (found.keep_runs, found.keep_bytes) == (3, 2 * 1024**3)
    assert found.pools["g2.8"] == PoolConfig(
        "g2.8",
        engine="ssh",
        hosts=("a", "b"),
        gpus=8,
        cores=64,
        role="data",
        python="/opt/bin/python",
        interface="ib0",
        network="private",
        max_hosts=2,
        idle_timeout_s=60,
        lease_s=5,
        start_timeout_s=30.5,
        options={"user": "me"},
    )
    batch = found.pools["batch"]
    assert (batch.max_hosts, batch.role, batch.idle_timeout_s) == (4, "ranks", 600)
    assert found.pools["local"] == PoolConfig("local")


def test_local_may_be_set_otherwise(home: Path) -> None:
    assert loaded(home, "[pools.local]\ncores = 2").pool("local").cores == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pools = [", "cannot be read"),
        ("[pool.x]", "no such key 'pool' (did you mean 'pools'?); possible: store, capture"),
        ("[pools.x]\ngpu = 1", "no such key 'gpu' (did you mean 'gpus'?); possible: engine"),
        ("[pools.x]\nengine = 'shh'", 'possible is "local", "ssh", or a Dask'),
        ("[pools.x]\nengine = 'ssh'", "belong together"),
        ("[pools.x]\nhosts = ['a']", "belong together"),
        ("[pools.x]\nhosts = 'a'", "a list of texts"),
        ("[pools.x]\ngpus = -1", "gpus = -1: possible is a whole number from 0"),
        ("[pools.x]\ngpus = true", "gpus = True: possible is a whole number from 0"),
        ("[pools.x]\nlease_s = nan", "a number of seconds above 0"),
        ("[data]\nover = 'burst'", '"wait" or "spill"'),
        ("[pools.x]\nrole = 'tpu'", '"ranks" or "data"'),
        ("[pools.'x y']\n", "a pool's name is"),
        ("[pools.local]\nengine = 'a.B'", "pool 'local' is this machine"),
        ("[capture]\nlimit = '4 apples'", 'a size such as "4GiB"'),
        ("[capture]\nlimit = 0", 'a size such as "4GiB"'),
        ("store = 1", "possible is a table"),
        ("[store]\npath = 3", "a text"),
    ],
)
def test_a_mistake_gets_one_line_with_the_file(home: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(home, text)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(home / "taas.toml"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 1024**3), ("500MB", 500_000_000), ("1.5G", 1_500_000_000), ("4096", 4096)],
)
def test_sizes(text: str, size: int) -> None:
    assert taas_toml.parse_size(text) == size


def test_a_gpu_pools_name_is_local_only_without_a_file(home: Path) -> None:
    without = Config()
    assert without.pool("g2.8") == without.pools["local"]
    assert (
        without.pool_note("g2.8") == "no taas.toml: pool 'g2.8' means this machine (pool 'local')"
    )
    assert without.pool_note("local") is None
    assert loaded(home, "").pool_note("g2.8") is None
    with pytest.raises(UsageError, match=r"no pool 'g2.8' in .*; possible: local"):
        loaded(home, "").pool("g2.8")
