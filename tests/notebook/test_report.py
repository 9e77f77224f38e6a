"""`%taas report` after a run that failed, in a real notebook."""

from pathlib import Path

import pytest

from taas_magic.config import Config, PoolConfig, RunsConfig
from taas_magic.errors import RankFailed, UsageError
from taas_magic.notebook.report import write_report
from tests.harness import Notebook


def test_the_report_of_a_failed_run(notebook: Notebook) -> None:
    cell = "secret_variable = 'hunter2'\nprint('a line')\n\n\n\nraise ValueError('odd')"
    assert isinstance(notebook.run(cell, gpus=1).error, RankFailed)
    notebook.define("%taas report")
    [path] = notebook.project.glob("taas-report-*.txt")
    text = path.read_text()
    path.unlink()
    assert "taas-magic " in text and "torch 2" in text and "there is no taas.toml" in text
    assert '"kind":"failure"' in text.replace(" ", "") and "odd" in text
    assert '"kind":"lines"' not in text.replace(" ", "") and "hunter2" not in text
    assert 'log of pool "local"' in text


@pytest.mark.process
def test_the_report_has_no_secrets_and_only_the_user_can_read_it(tmp_path: Path) -> None:
    pool = PoolConfig("hpc", engine="dask_jobqueue.SLURMCluster", options={"token": "hunter2"})
    runs = RunsConfig(notify="curl https://example.org/?key=hunter2")
    earlier = tmp_path / "report.txt"
    earlier.touch()
    earlier.chmod(0o644)
    path = write_report(Config(pools={"hpc": pool}, runs=runs), None, tmp_path / "report.txt")
    assert "hunter2" not in path.read_text() and '"token"' in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.process
def test_a_report_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*no-such-folder"):
        write_report(Config(), None, tmp_path / "no-such-folder" / "report.txt")
