"""The map of tenants: which row goes to whom, and what is no map."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from harness.errors import UserError
from workloads.traces import TenantMap, TraceRow, load_map
from workloads.traces.tenant_map import Draw

TRACE = Path("trace.csv")


def mapped(tmp_path: Path, text: str) -> TenantMap:
    path = tmp_path / "map.toml"
    path.write_text(text)
    return load_map(path)


def row(line: int, input_tokens: int = 10, session: str = "", *labels: str) -> TraceRow:
    return TraceRow(line, input_tokens, 1, line, session=session, labels=labels)


def counts(tenants: TenantMap, rows: list[TraceRow], seed: int = 0) -> Counter[str]:
    draw = Draw(tenants, ("Model", "Log Type"), seed, TRACE)
    return Counter(draw.tenant_of(one) for one in rows)


def test_the_example_map_fits_a_trace_of_lengths_alone(root: Path) -> None:
    tenants = load_map(root / "workloads" / "traces" / "example_tenants.toml")
    draw = Draw(tenants, (), 0, TRACE)
    assert draw.tenant_of(row(1, 4000)) == "documents"
    found = Counter(draw.tenant_of(row(line, 3999)) for line in range(2000))
    assert set(found) == {"premium", "standard"}
    assert found["premium"] / 2000 == pytest.approx(0.3, abs=0.03)
    documents = tenants.tenants[0]
    assert (documents.tier, documents.weight, documents.priority) == ("bronze", 1, 2)
    assert (documents.slo_ttft_ms, documents.short) == (3000, False)


def test_defaults(tmp_path: Path) -> None:
    only = mapped(tmp_path, '[[tenant]]\nname = "a"\n').tenants[0]
    assert (only.tier, only.kind, only.weight, only.priority, only.slo_ttft_ms) == ("a", "trace", 1, 0, 1000)
    assert TenantMap().tenants[0].name == "trace"


def test_bounds_and_columns_hold_together_and_the_first_wins(tmp_path: Path) -> None:
    tenants = mapped(
        tmp_path,
        """
        [[tenant]]
        name = "big-api"
        match = { "log type" = "API log", Model = ["GPT-4", "GPT-5"] }
        min_input_tokens = 100
        [[tenant]]
        name = "small"
        max_input_tokens = 50
        [[tenant]]
        name = "rest"
        """,
    )
    draw = Draw(tenants, ("Model", "Log Type"), 0, TRACE)
    assert draw.tenant_of(row(1, 100, "", "GPT-4", "API log")) == "big-api"
    assert draw.tenant_of(row(1, 99, "", "GPT-4", "API log")) == "rest"
    assert draw.tenant_of(row(1, 100, "", "GPT-4", "Conversation log")) == "rest"
    assert draw.tenant_of(row(1, 50, "", "GPT-5", "API log")) == "small"


SHARES = """
[[tenant]]
name = "a"
share = 0.2
[[tenant]]
name = "b"
share = 0.5
[[tenant]]
name = "c"
share = 0.3
"""


def test_shares_are_of_all_rows_and_add_up_to_them(tmp_path: Path) -> None:
    found = counts(mapped(tmp_path, SHARES), [row(line) for line in range(4000)])
    assert sum(found.values()) == 4000
    for name, share in (("a", 0.2), ("b", 0.5), ("c", 0.3)):
        assert found[name] / 4000 == pytest.approx(share, abs=0.03)


def test_a_session_stays_with_one_tenant_and_the_seed_moves_it(tmp_path: Path) -> None:
    tenants = mapped(tmp_path, SHARES)
    for session in ("x", "y", "z"):
        assert len(counts(tenants, [row(line, session=session) for line in range(50)])) == 1
    owners = {tuple(counts(tenants, [row(1, session="x")], seed)) for seed in range(30)}
    assert len(owners) == 3


def test_rows_that_nobody_takes_and_shares_above_one_are_errors(tmp_path: Path) -> None:
    alone = mapped(tmp_path, '[[tenant]]\nname = "a"\nmax_input_tokens = 50\n')
    with pytest.raises(
        UserError, match=r"trace\.csv: line 7: no tenant of map\.toml takes this row \(51 input"
    ):
        counts(alone, [row(7, 51)])
    much = mapped(tmp_path, SHARES.replace("0.5", "0.6"))
    with pytest.raises(UserError, match=r"add up to 1\.1; they may not exceed 1"):
        counts(much, [row(line) for line in range(200)])
    little = mapped(tmp_path, SHARES.replace("0.5", "0.4"))
    with pytest.raises(UserError, match="no tenant of"):
        counts(little, [row(line) for line in range(200)])


def test_a_column_that_the_trace_lacks_is_an_error(tmp_path: Path) -> None:
    tenants = mapped(tmp_path, '[[tenant]]\nname = "a"\nmatch = { Modle = "x" }\n')
    with pytest.raises(
        UserError, match=r"matches on 'Modle', a column that trace\.csv does not have; it has Model"
    ):
        Draw(tenants, ("Model", "Log Type"), 0, TRACE)
    with pytest.raises(UserError, match="none but times and lengths"):
        Draw(tenants, (), 0, TRACE)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "tenant: Field required"),
        ("tenant = []\n", "tenant"),
        ('[[tenant]]\nname = "a"\n[other]\n', "other: Extra inputs"),
        ("[[tenant]]\nweight = 1\n", "tenant.0.name: Field required"),
        (
            '[[tenant]]\nname = "a"\nsharee = 0.5\n',
            "tenant.0.sharee: Extra inputs are not permitted; a tenant has name",
        ),
        ('[[tenant]]\nname = "a"\nshare = 0\n', "tenant.0.share"),
        ('[[tenant]]\nname = "a"\nshare = 1.5\n', "tenant.0.share"),
        ('[[tenant]]\nname = "a"\nshare = nan\n', "tenant.0.share"),
        ('[[tenant]]\nname = "a"\nweight = 0.5\n', "tenant.0.weight"),
        ('[[tenant]]\nname = "a"\nslo_ttft_ms = -1\n', "tenant.0.slo_ttft_ms"),
        ('[[tenant]]\nname = "a"\nshort = "yes"\n', "tenant.0.short"),
        ('[[tenant]]\nname = "a/b"\n', "names and tiers are letters"),
        ('[[tenant]]\nname = "a"\ntier = "x y"\n', "names and tiers are letters"),
        (
            '[[tenant]]\nname = "a"\nmin_input_tokens = 9\nmax_input_tokens = 8\n',
            "9 is above max_input_tokens 8",
        ),
        ('[[tenant]]\nname = "a"\nmatch = { Model = [] }\n', "match.Model is empty"),
        ('[[tenant]]\nname = "a"\nshare = 0.5\n[[tenant]]\nname = "a"\n', "two tenants are called 'a'"),
        ('[[tenant]]\nname = "a"\n[[tenant]]\nname = "b"\n', "'b' after it would get none"),
        ("[[tenant]\n", "not readable as TOML"),
    ],
)
def test_what_is_no_map_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        mapped(tmp_path, text)
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'map.toml'}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_map_points_to_the_example(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file; workloads/traces/example_tenants\.toml"):
        load_map(tmp_path / "none.toml")


def test_a_map_survives_its_json(tmp_path: Path) -> None:
    tenants = mapped(tmp_path, SHARES + 'match = { Model = ["x", 3] }\n')
    assert TenantMap.from_json(tenants.to_json(), tenants.file) == tenants
