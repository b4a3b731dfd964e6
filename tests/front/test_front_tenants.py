"""Guards the identity file: who has which key, what is refused and how it is said, and that keys are not kept."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.tenant_keys import add_key, issue, revoke
from patches.front.access import OPERATOR as OPERATORS
from patches.front.access import Access, Caller, bearer, verdict
from patches.front.tenants import NOBODY, Identity, digest_of, key_ring, new_key, read_entries
from tests.front.driven import FILE, GOLD, OPERATOR, SILVER, identity_file
from tests.live.small_workload import TENANT

DIGEST = digest_of(GOLD)


def test_a_key_finds_its_tenant_and_nobody_elses(tmp_path: Path) -> None:
    ring = key_ring(identity_file(tmp_path))
    assert ring.find(GOLD) == Identity("gold-a", "gold", 4.0, -1, 200.0)
    assert ring.find(SILVER) == Identity("silver-b", "silver", 2.0, 0, None)
    for stranger in ("", "gold-ke", "gold-key ", DIGEST, "\udc80"):
        assert ring.find(stranger) is None


def test_what_the_engine_is_told() -> None:
    gold, silver = Identity("gold-a", "gold", 4.0, -1, 200.0), Identity("silver-b", "silver", 2.0, 0, None)
    assert gold.xargs == {"tenant": "gold-a", "tier": "gold", "weight": 4.0, "slo_ttft_ms": 200.0}
    assert silver.xargs == {"tenant": "silver-b", "tier": "silver", "weight": 2.0}
    assert NOBODY.xargs == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no tenant"),
        ("[a", "no TOML"),
        ("tier = 1", "only tables"),
        ('["a b"]', "letters, digits"),
        ("[a]\nweight = 0", r"\[a\] weight: input should be greater than 0"),
        ("[a]\nweight = inf", r"\[a\] weight"),
        ('[a]\nweight = "4"', r"\[a\] weight: input should be a valid number"),
        ("[a]\npriority = 1.5", r"\[a\] priority"),
        ("[a]\nslo_ttft_ms = -1", r"\[a\] slo_ttft_ms"),
        ("[a]\nkeys = 'x'", r"\[a\] keys: give the SHA-256"),
        ("[a]\nkeys = ['secret-key']", r"\[a\] keys.0: give the SHA-256 of the key$"),
        ("[a]\nadmin = true", r"\[a\] admin: extra inputs are not permitted"),
        (f"[a]\nkeys = ['{DIGEST}']\n[b]\nkeys = ['{DIGEST}']", r"\[a\] and \[b\] share a key"),
    ],
)
def test_a_wrong_file_is_one_line_without_its_keys(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        read_entries(identity_file(tmp_path, text))
    assert "secret-key" not in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_others_may_write_or_that_is_not_there(tmp_path: Path) -> None:
    path = identity_file(tmp_path)
    path.chmod(0o620)
    with pytest.raises(UserError, match="others may write it"):
        read_entries(path)
    with pytest.raises(UserError, match=r"no such file.*bench keys"):
        read_entries(tmp_path / "none.toml")


def test_keys_are_made_kept_as_hashes_and_revoked(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.toml"
    first = add_key(path, "gold-a", {"tier": "gold", "weight": 4.0})
    second = add_key(path, "gold-a", {"priority": -1})
    other = add_key(path, "b", {})
    text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(len(key) > 40 and key not in text for key in (first, second, other))
    ring = key_ring(path)
    assert ring.find(first) == ring.find(second) == Identity("gold-a", "gold", 4.0, -1, None)
    assert revoke(path, "gold-a") == 2
    ring = key_ring(path)
    assert ring.find(first) is None and ring.find(other) is not None
    assert read_entries(path)["gold-a"].weight == 4.0
    with pytest.raises(UserError, match="no tenant 'c'"):
        revoke(path, "c")


def test_a_wrong_value_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = identity_file(tmp_path)
    with pytest.raises(UserError, match="weight"):
        add_key(path, "gold-a", {"weight": -1.0})
    with pytest.raises(UserError, match="letters"):
        add_key(path, "a.b", {})
    assert path.read_text() == FILE
    with pytest.raises(UserError, match="weight"):
        add_key(tmp_path / "new.toml", "a", {"weight": -1.0})
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity.toml"]


def test_a_run_gives_each_of_its_tenants_a_key(tmp_path: Path) -> None:
    keys = issue([TENANT], tmp_path / "run.toml")
    found = key_ring(tmp_path / "run.toml").find(keys["gold-a"])
    assert found is not None and found.priority == TENANT.priority
    assert found.xargs == TENANT.identity


def test_new_keys_differ_and_fit_a_header() -> None:
    made = {new_key() for _ in range(50)}
    assert len(made) == 50 and all(all(32 < ord(c) < 127 for c in key) for key in made)


def test_a_changed_file_is_taken_up_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("patches.front.access.time.monotonic", lambda: now[0])
    path = identity_file(tmp_path)
    access = Access(path)
    revoke(path, "gold-a")
    assert access.caller(GOLD) is not None  # not looked at again yet
    now[0] = 1.5
    assert access.caller(GOLD) is None and access.caller(SILVER) is not None
    path.write_text("[broken")
    now[0] = 3.0
    assert access.caller(SILVER) is not None and "no TOML" in access.fault
    path.unlink()
    now[0] = 5.0
    assert access.caller(SILVER) is not None and "no such file" in access.fault
    identity_file(tmp_path)
    now[0] = 7.0
    assert access.caller(GOLD) is not None and not access.fault


def test_the_operator_is_no_tenant(tmp_path: Path) -> None:
    access = Access(identity_file(tmp_path))
    assert access.caller(OPERATOR) is None
    access.admit_operators([OPERATOR])
    assert access.caller(OPERATOR) == Caller(NOBODY, operator=True)
    assert access.caller(None) is None


@pytest.mark.parametrize(
    ("method", "path", "nobody", "tenant"),
    [
        ("GET", "/health", 0, 0),
        ("GET", "/metrics", 0, 0),
        ("OPTIONS", "/v1/completions", 0, 0),
        ("POST", "/ping", 0, 0),
        ("POST", "/v1/completions", 401, 0),
        ("POST", "/v1/chat/completions", 401, 0),
        ("GET", "/v1/models", 401, 0),
        ("GET", "/v1/models/m", 401, 0),
        ("GET", "/v1/responses/r1", 401, 403),
        ("POST", "/v1/responses", 401, 403),
        ("POST", "/v1/completions/", 401, 403),
        ("POST", "//v1/completions", 401, 403),
        ("POST", "/V1/completions", 401, 403),
        ("POST", "/invocations", 401, 403),
        ("POST", "/inference/v1/generate", 401, 403),
        ("POST", "/reset_prefix_cache", 401, 403),
        ("DELETE", "/v1/models", 401, 403),
        ("WEBSOCKET", "/v1/completions", 401, 403),
    ],
)
def test_who_may_call_what(method: str, path: str, nobody: int, tenant: int) -> None:
    gold = Caller(Identity("gold-a", "gold", 4.0, -1, None))
    assert (verdict(method, path, None), verdict(method, path, gold)) == (nobody, tenant)
    assert verdict(method, path, OPERATORS) == 0


def test_how_a_key_is_shown() -> None:
    def shown(*values: bytes) -> str | None:
        return bearer([(b"authorization", value) for value in values])

    assert shown(b"Bearer a-key") == shown(b"bEARER  a-key ") == "a-key"
    assert shown() is shown(b"Basic a-key") is shown(b"Bearer ") is shown(b"a-key") is None
    assert shown(b"Bearer a", b"Bearer b") is None
