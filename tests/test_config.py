"""Configuration and stores: arguments, environment, defaults; bad values name themselves."""

from __future__ import annotations

import dataclasses
import re
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tailcut import Config, ConfigError, FileStore, Group, Scenario


def test_arguments_come_before_the_environment_and_that_before_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Config().window_ops == 1024
    monkeypatch.setenv("TAILCUT_WINDOW_OPS", "8")
    assert Config().window_ops == 8
    assert Config(window_ops=9).window_ops == 9


def test_every_field_can_be_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "offload": "0",
        "bound_sums": "1",
        "resend": "0",
        "rejoin": "0",
        "adaptive": "0",
        "straggler_share": "0.5",
        "address": "127.0.0.1",
        "deadline_s": "0.5",
        "rendezvous_s": "3",
        "packet_bytes": "512",
        "codec": "raw",
        "late": "carry",
        "residue": "carry",
        "reliable": "*.norm.*, head",
        "multicast": "off",
        "over_budget": "wait",
        "trim_bytes": "256",
        "receive_uncorrected": "1",
    }
    for field in dataclasses.fields(Config):
        monkeypatch.setenv(
            f"TAILCUT_{field.name.upper()}", texts.get(field.name, "65536" if "bytes" in field.name else "7")
        )
    config = Config()
    assert (config.offload, config.address, config.deadline_s, config.seed) == (False, "127.0.0.1", 0.5, 7)
    assert config.reliable == ("*.norm.*", "head")


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILCUT_DEADLINE_S", "soon")
    with pytest.raises(ConfigError, match="TAILCUT_DEADLINE_S='soon' is not a valid float"):
        Config()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("deadline_s", 0),
        ("deadline_s", float("nan")),
        ("window_ops", 0),
        ("pool_bytes", 10),
        ("receive_buffer_bytes", -1),
        ("packet_bytes", 255),
        ("lanes", 0),
        ("seed", -1),
        ("straggler_share", 1.1),
        ("address", "localhost"),
        ("multicast", "yes"),
        ("multicast_ttl", 0),
        ("multicast_ttl", 256),
        ("rendezvous_s", 0),
        ("rows", -1),
        ("dscp", 64),
        ("offload", "yes"),
        ("lanes", "2"),
        ("codec", 3),
        ("reliable", "*.norm.*"),
        ("reliable", ("",)),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Config(**{field: value})


def test_the_page_of_the_configuration_is_what_its_docstrings_say() -> None:
    root = Path(__file__).parents[1]
    page = runpy.run_path(str(root / "scripts" / "configuration.py"))["page"]()
    assert (root / "docs" / "configuration.md").read_text() == page, "run: make docs"
    assert all(f"| `{field.name}` |" in page for field in dataclasses.fields(Config))


def test_a_configuration_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config(1.0)  # type: ignore[call-arg]


def test_a_group_takes_settings_beside_a_configuration_and_they_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Group(0, 1, FileStore(tmp_path), Config(seed=3, planes=4), planes=8, deadline_s=0.5) as group:
        assert (group.config.seed, group.config.planes, group.config.deadline_s) == (3, 8, 0.5)
    monkeypatch.setenv("TAILCUT_PLANES", "many")  # not looked at: a keyword comes before it
    with Group(0, 1, FileStore(tmp_path / "other"), planes=8) as group:
        assert group.config == Config(planes=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deadline": 5}, "'deadline' is no setting of tailcut; did you mean deadline_s?"),
        ({"overbudget": "wait"}, "did you mean over_budget?"),
        ({"zzz": 1}, "'zzz' is no setting of tailcut (docs/configuration.md has all)"),
        ({"planes": 17}, "planes=17"),
        ({"config": {"planes": 4}}, "config takes a tailcut.Config, not dict"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused_with_a_suggestion(
    tmp_path: Path, settings: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Group(0, 1, FileStore(tmp_path), **settings)


@pytest.mark.parametrize(
    "bad", [{"ranks": 0}, {"loss": 2}, {"ops": -1}, {"depth": 0}, {"compute_s": [[0.0]]}]
)
def test_a_bad_scenario_is_refused(bad: dict) -> None:
    with pytest.raises(ConfigError):
        Scenario(**{"ranks": 2} | bad)


def test_a_file_store_keeps_keys_apart_and_replaces_them_whole(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "new" / "directory")
    store.set("a/b", b"\0\xff")
    store.set("a%2Fb", b"other")
    assert (store.get("a/b"), store.get("a%2Fb")) == (b"\0\xff", b"other")
    assert store.check(["a/b"])
    assert not store.check(["a/b", "c"])
    store.set("a/b", b"again")
    assert store.get("a/b") == b"again"
    assert sorted(path.name for path in (tmp_path / "new" / "directory").iterdir()) == ["a%252Fb", "a%2Fb"]


def test_a_file_store_waits_for_a_key_and_gives_up(tmp_path: Path) -> None:
    store = FileStore(tmp_path, timeout_s=20)
    writer = threading.Thread(target=store.set, args=("late", b"1"))
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(store.get("late")))
    reader.start()
    writer.start()
    writer.join()
    reader.join()
    assert got == [b"1"]
    with pytest.raises(TimeoutError, match="no 'never'"):
        FileStore(tmp_path, timeout_s=0.01).get("never")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="FileStore cannot use"):
        FileStore(tmp_path / "file" / "directory")


def test_compare_set_is_that_of_torch(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    assert store.compare_set("key", "other", "new") == b"other"  # torch's answer if there is none
    assert not store.check(["key"])
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "", "second") == b"first"
    assert store.compare_set("key", "first", "third") == b"third"
    assert store.get("key") == b"third"


def test_of_many_that_compare_and_set_one_wins(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        seen = set(pool.map(lambda k: FileStore(tmp_path).compare_set("key", "", str(k)), range(64)))
    assert seen == {FileStore(tmp_path).get("key")}
