"""Tests of taas.toml: which file is found, its values, and one-line errors for mistakes."""

import grp
import os
import pwd
from pathlib import Path

import pytest

from taas_magic.config import Config, DataConfig, PoolConfig, find_config, load_config, parse_size
from taas_magic.errors import UsageError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    (path / "project" / "deep").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(path))
    return path


def loaded(home: Path, text: str) -> Config:
    (home / "taas.toml").write_text(text)
    return load_config(home / "project")


def test_without_a_file_everything_is_local(home: Path) -> None:
    assert load_config(home / "project") == Config()
    assert set(Config().pools) == {"local"}


def test_the_nearest_configuration_file_is_used(home: Path) -> None:
    for folder in (home, home / "project"):
        (folder / "taas.toml").write_text("")
    assert find_config(home / "project" / "deep") == home / "project" / "taas.toml"
    assert find_config(home) == home / "taas.toml"


@pytest.mark.parametrize("is_link", [False, True])
def test_no_configuration_file_is_used_from_above_the_home_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    (home.parent / "taas.toml").write_text("")
    if is_link:
        (home.parent / "link").symlink_to(home)
        monkeypatch.setenv("HOME", str(home.parent / "link"))
    assert find_config(home / "project") is None


def test_without_another_file_the_users_own_configuration_file_is_used(
    home: Path, tmp_path: Path
) -> None:
    user = tmp_path / "config" / "taas" / "taas.toml"
    user.parent.mkdir(parents=True)
    user.write_text("")
    assert find_config(home / "project") == user


def test_all_keys(home: Path) -> None:
    text = """
    [store]
    path = "data"
    limit = "2GB"
    [data]
    buffer = "2GiB"
    rank_buffer = "64MiB"
    fetch_s = 30
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
    ssh_config = "hosts"
    [pools.batch]
    engine = "dask_jobqueue.SLURMCluster"
    max_hosts = 4
    """
    found = loaded(home, text)
    assert (found.store.path, found.source) == (str(home / "data"), home / "taas.toml")
    assert found.store.limit_bytes == 2_000_000_000
    assert found.data == DataConfig(2 << 30, 64 << 20, 30.0)
    assert found.capture.limit_bytes == 500_000_000
    assert (found.runs.keep, found.runs.keep_bytes) == (3, 2 * 1024**3)
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
        options={"ssh_config": "hosts"},
    )
    batch = found.pools["batch"]
    assert (batch.max_hosts, batch.role, batch.idle_timeout_s) == (4, "ranks", 600)
    assert found.pools["local"] == PoolConfig("local")


def test_a_file_may_change_the_settings_of_the_pool_local(home: Path) -> None:
    assert loaded(home, "[pools.local]\ncores = 2").pool("local").cores == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pools = [", "cannot be read"),
        ("[pool.x]", 'no key "pool" (did you mean "pools"?). The keys are: store, capture'),
        ("hang_s = 10", 'no key "hang_s" (it belongs below "[runs]"). The keys are: store'),
        ("[pools.x]\ngpu = 1", 'no key "gpu" (did you mean "gpus"?). The keys are: engine'),
        ("[pools.g2.8]\nengine = 'ssh'", 'called "g2.8", write [pools."g2.8"]'),
        (
            "[pools.x]\nengine = 'ssh'\nhosts = ['a']\noptions = { ssh_conf = 'file' }",
            'options has no key "ssh_conf" (did you mean "ssh_config"?)',
        ),
        ("[pools.x]\nengine = 'shh'", 'engine needs "local", "ssh", or a Dask'),
        ("[pools.x]\nengine = 'ssh'", 'engine "ssh" needs hosts = ["host1", …]'),
        ("[pools.x]\nhosts = ['a']", "hosts needs engine = \"ssh\"; got engine 'local'"),
        ("[pools.x]\nhosts = 'a'", "a list of strings"),
        ("[pools.x]\nhosts = ['a', '']", "hosts needs a list of strings such as"),
        ("[pools.x]\npreload = ['os.path', '1x']", "preload needs a list of modules such as"),
        ("[pools.x]\nname = 'y'", 'no key "name"'),
        ("[pools.x]\noptions = 1", "options needs a table; got 1"),
        ("[pools.x]\npython = ''", "python needs a text; got ''"),
        (
            "[data]\nbuffer = 'much'",
            "1000000; got 'much'",
        ),
        ("[pools.x]\ngpus = -1", "gpus needs a whole number, at least 0; got -1"),
        ("[pools.x]\ngpus = true", "gpus needs a whole number, at least 0; got True"),
        ("[pools.x]\nlease_s = nan", "a number of seconds above 0"),
        ("[data]\nfetch_s = 3", "a number of seconds, at least 4"),
        ("[pools.x]\nrole = 'tpu'", '"ranks" or "data"'),
        ("[pools.'x y']\n", "a pool's name is"),
        ("[pools.local]\nengine = 'a.B'", 'pool "local" is this machine'),
        ("[capture]\nlimit = '4 apples'", 'a size such as "4GiB"'),
        ("[capture]\nlimit = 0", 'a size such as "4GiB"'),
        ("[capture]\nlimit = 5.5", 'a size such as "4GiB"'),
        ("[capture]\nlimit = '5.5'", 'a size such as "4GiB"'),
        ("store = 1", "needs a table; got 1"),
        (f"[runs]\nkeep = {'9' * 400}", "keep needs a whole number, at least 1"),
        (f"[runs]\nkeep_size = {'9' * 400}", "keep_size needs a size"),
        (f"[runs]\nkeep_size = '{'9' * 400}T'", "keep_size needs a size"),
        (f"[pools.x]\nlease_s = {'9' * 400}", "lease_s needs a number of seconds"),
        (f"x = {'[' * 3000}{']' * 3000}", "its brackets are nested too deeply"),
        ("[store]\npath = 3", "a text"),
    ],
)
def test_a_mistake_gets_one_line_with_the_file(home: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(home, text)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(home / "taas.toml"))
    assert "\n" not in str(caught.value)


def test_the_home_folder_of_a_user_that_does_not_exist_is_a_folder_name(home: Path) -> None:
    """A run then reports that this store is missing, as for `--store`."""
    found = loaded(home, "[store]\npath = '~no-such-user/x'")
    assert found.store.path == str(home / "~no-such-user" / "x")


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 1024**3), ("500MB", 500_000_000), ("1.5G", 1_500_000_000), ("4096", 4096)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_gpu_pools_name_is_local_only_without_a_file(home: Path) -> None:
    without = Config()
    assert without.pool("g2.8") == without.pools["local"]
    assert without.pool_note("g2.8") == 'There is no taas.toml: pool "g2.8" is this machine.'
    assert without.pool_note("local") is None
    assert loaded(home, "").pool_note("g2.8") is None
    with pytest.raises(UsageError, match=r'No pool "g2.8" in .*. It has: local'):
        loaded(home, "").pool("g2.8")


def advice(command: str) -> str:
    return f". Move the file to ~/.config/taas. Or, if you trust its content, run: {command}"


def refusal(home: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(home / "project")
    return str(caught.value)


def test_a_configuration_file_that_others_can_write_is_refused(home: Path) -> None:
    file = home / "taas.toml"
    loaded(home, "")
    file.chmod(0o666)
    assert f"everybody can write {file}" + advice(f"chmod go-w {file}") in refusal(home)
    file.chmod(0o644)
    home.chmod(0o777)
    assert f"everybody can write {home}" + advice(f"chmod go-w {home}") in refusal(home)
    home.chmod(0o1777)  # sticky bit: others cannot replace the user's files
    assert load_config(home / "project").source == file


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_a_configuration_file_of_another_user_is_refused(home: Path) -> None:
    file = home / "taas.toml"
    loaded(home, "")
    os.chown(file, 12345, -1)
    assert f"{file} belongs to uid 12345" + advice(f"sudo chown 0 {file}") in refusal(home)
    os.chown(file, 0, 12345)
    file.chmod(0o664)
    assert f"group 12345 can write {file}" + advice(f"chmod go-w {file}") in refusal(home)
    file.chmod(0o644)
    os.chown(home, 12345, -1)
    assert f"{home} belongs to uid 12345" in refusal(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_a_link_to_a_configuration_file_that_others_can_write_is_refused(
    home: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "settings").touch()
    (home / "taas.toml").symlink_to(theirs / "settings")
    assert load_config(home / "project").source == home / "taas.toml"
    theirs.chmod(0o777)
    assert f"everybody can write {theirs}" in refusal(home)


def test_a_configuration_file_that_the_users_private_group_can_write_is_used(home: Path) -> None:
    loaded(home, "")
    os.chown(home / "taas.toml", -1, os.getgid())
    (home / "taas.toml").chmod(0o664)
    own = pwd.getpwuid(os.geteuid())
    if grp.getgrgid(os.getgid()).gr_name == own.pw_name:
        assert load_config(home / "project").source
