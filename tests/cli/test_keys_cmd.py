"""Guards `bench keys`: the key alone on standard output, once, and what is said of bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import main
from patches.front.tenants import key_ring, read_entries


def bench(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["keys", *words])
    return int(ended.value.code or 0)


def test_a_key_is_printed_once_and_opens_the_tenant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "identity.toml")
    options = ("--tier", "gold", "--weight", "4", "--priority", "-1", "--slo-ttft-ms", "200")
    assert bench(file, "gold-a", *options) == 0
    out, err = capsys.readouterr()
    key = out.strip()
    assert out == f"{key}\n" and key not in err and "not kept anywhere" in err
    found = key_ring(Path(file)).find(key)
    assert found is not None and (found.tenant, found.tier, found.priority) == ("gold-a", "gold", -1)
    assert bench(file, "gold-a", "--revoke") == 0
    assert "1 key revoked" in capsys.readouterr().out
    assert read_entries(Path(file))["gold-a"].keys == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.b"], "letters, digits"),
        (["a", "--weight", "0"], "[a] weight: input should be greater than 0"),
        (["a", "--revoke"], "no such file"),
        (["a", "--revoke", "--tier", "gold"], "--revoke"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert bench(str(tmp_path / "identity.toml"), *words) == 2
    out, err = capsys.readouterr()
    assert not out and said in err and err.count("\n") == 1
    assert not (tmp_path / "identity.toml").exists()
