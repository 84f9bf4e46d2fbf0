"""Rendezvous over real sockets: who is confirmed, who is named, and what an earlier life has left."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from tailcut import Config, ConfigError, FileStore, Group, PeerError, Report
from tailcut.meeting.addresses import host_identity
from tailcut.meeting.handshake import _ANSWER, _MESSAGE
from tailcut.meeting.roster import Card
from tests.groups import allreduce, open_groups, vectors


def test_a_missing_peer_at_rendezvous_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"Ranks \[1, 2\] did not come"):
        Group(0, 3, FileStore(tmp_path), Config(rendezvous_s=0.05))


def test_ranks_that_disagree_on_the_configuration_are_told_apart(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def open_one(rank: int) -> None:
        try:
            Group(rank, 2, FileStore(tmp_path), Config(seed=rank, rendezvous_s=20))
        except ConfigError as error:
            errors.append(error)

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(error) for error in errors] == [
        "the ranks of group 'default' must agree on seed: rank 0 has 0, rank 1 has 1"
    ] * 2


def test_any_store_with_set_and_get_will_do() -> None:
    class Plain:
        def __init__(self) -> None:
            self.values: dict[str, bytes] = {}
            self.set = self.values.__setitem__
            self.get = self.values.__getitem__

    class Checked(Plain):
        def check(self, keys: list[str]) -> bool:
            return all(key in self.values for key in keys)

    for store in (Plain(), Checked()):
        with ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(lambda rank, store=store: Group(rank, 2, store), range(2)))
            assert all(report.status == "complete" for report in allreduce(groups, vectors(2, 100)))
            list(pool.map(Group.close, groups))


def test_a_torch_store_will_do() -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: Group(rank, 2, store), range(2)))
        assert all(report.status == "complete" for report in allreduce(groups, vectors(2, 100)))
        list(pool.map(Group.close, groups))


def stale_card(port: int, instance: str = "ab" * 16) -> bytes:
    card = Card(host_identity(), [], True, [port], 1 << 20, 1 << 20, Config().agreed, instance)
    return json.dumps(asdict(card)).encode()


@contextmanager
def udp_socket() -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as peer:
        peer.bind(("127.0.0.1", 0))
        yield peer


def test_a_store_that_was_used_before_serves_again(tmp_path: Path) -> None:
    for _ in range(3):
        with open_groups(tmp_path, 3) as groups:
            reports = allreduce(groups, vectors(3, 100))
            assert [report.status for report in reports] == ["complete"] * 3


def test_a_card_of_an_earlier_life_is_read_again_until_its_rank_is_there(tmp_path: Path) -> None:
    """The port of the old card is open, and belongs to a process that does not answer to the old instance."""
    store = FileStore(tmp_path)
    with udp_socket() as neighbour:
        store.set("tailcut/default/1", stale_card(neighbour.getsockname()[1]))
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(Group, 0, 2, store)
            neighbour.recv(65_535)  # rank 0 has believed the old card
            groups = [pool.submit(Group, 1, 2, store).result(), first.result()][::-1]
            assert [r.status for r in allreduce(groups, vectors(2, 100))] == ["complete"] * 2
            list(pool.map(Group.close, groups))


def test_a_peer_that_does_not_answer_is_named_with_its_address(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    with udp_socket() as silent:
        port = silent.getsockname()[1]
        store.set("tailcut/default/1", stale_card(port))
        expected = rf"Ranks \[2\] did not come.*Rank 1 does not answer at 127\.0\.0\.1 \(UDP port {port}\)"
        with pytest.raises(PeerError, match=expected):
            Group(0, 3, store, Config(rendezvous_s=0.05))


def test_a_path_that_swallows_full_packets_is_told_from_a_dead_one(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    with udp_socket() as peer:
        store.set("tailcut/default/1", stale_card(peer.getsockname()[1]))

        def answer_small_ones() -> None:
            while True:
                hello, source = peer.recvfrom(65_535)
                if len(hello) == 1:
                    return
                if len(hello) == _MESSAGE.size:
                    _, to, sender, lane, index, size = _MESSAGE.unpack(hello)
                    peer.sendto(_MESSAGE.pack(_ANSWER, sender, to, lane, index, size), source)

        thread = threading.Thread(target=answer_small_ones)
        thread.start()
        with pytest.raises(PeerError, match=r"answers small packets but none of \d+ bytes: set packet_bytes"):
            Group(0, 2, store, Config(rendezvous_s=1.0))
        peer.sendto(b"x", peer.getsockname())
        thread.join()


def test_two_processes_of_one_rank_are_told(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    with udp_socket() as peer, ThreadPoolExecutor(1) as pool:
        store.set("tailcut/default/1", stale_card(peer.getsockname()[1]))
        first = pool.submit(Group, 0, 2, store)
        peer.recv(65_535)  # it is in the meeting
        store.set("tailcut/default/0", stale_card(1))
        with pytest.raises(ConfigError, match="another process has joined group 'default' as rank 0"):
            first.result()


def test_strangers_on_the_port_do_not_disturb_the_meeting(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    with ThreadPoolExecutor(2) as pool, udp_socket() as stranger:
        first = pool.submit(Group, 0, 2, store)
        card = json.loads(store.get("tailcut/default/0"))
        instance = bytes.fromhex(card["instance"])
        wrong = [
            b"",
            b"tailcut?",
            bytes(65_507),
            _MESSAGE.pack(_ANSWER, instance, bytes(16), 0, 0, 100),
            _MESSAGE.pack(b"tailcut?", bytes(16), bytes(16), 0, 0, _MESSAGE.size),
            _MESSAGE.pack(b"tailcut?", instance, bytes(16), 7, 9, _MESSAGE.size),
        ]
        for datagram in wrong:
            stranger.sendto(datagram, ("127.0.0.1", card["ports"][0]))
        groups = [pool.submit(Group, 1, 2, store).result(), first.result()][::-1]
        assert [r.status for r in allreduce(groups, vectors(2, 100))] == ["complete"] * 2
        list(pool.map(Group.close, groups))
        assert not any(groups[0].stats().rejected.values())


class Withholding(FileStore):
    """A store so slow that it never tells that a peer is ready."""

    def check(self, keys: list[str]) -> bool:
        return all(key.count("/") == 2 for key in keys) and super().check(keys)  # cards only


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("lanes", [1, 2])
def test_packets_that_come_before_the_meeting_ends_begin_the_group_and_are_not_lost(
    tmp_path: Path, rows: int, lanes: int
) -> None:
    config = Config(rows=rows, lanes=lanes, resend=False, deadline_s=60, rendezvous_s=20)
    keys = [f"bucket-{k}" for k in range(4)]  # on both lanes
    arrays = [vectors(4, 5000, seed=k) for k in range(len(keys))]
    stores = [FileStore(tmp_path)] * 3 + [Withholding(tmp_path)]

    def average(rank: int) -> list[Report]:
        with Group(rank, 4, stores[rank], config) as group:
            works = [group.allreduce(arrays[k][rank], key) for k, key in enumerate(keys)]
            return [work.wait() for work in works]

    with ThreadPoolExecutor(4) as pool:
        for reports in pool.map(average, range(4)):
            assert [(report.status, report.missing_from) for report in reports] == [("complete", ())] * 4


def test_many_lanes_are_all_confirmed_and_their_number_is_agreed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(Group, rank, 2, FileStore(tmp_path), Config(lanes=lanes))
            for rank, lanes in enumerate((1, 3))
        ]
        for future in futures:
            with pytest.raises(ConfigError, match="lanes: rank 0 has 1, rank 1 has 3"):
                future.result()


def test_an_interface_is_used_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    with open_groups(tmp_path, 2) as groups:
        assert allreduce(groups, vectors(2, 100))[0].status == "complete"
        assert json.loads(FileStore(tmp_path).get("tailcut/default/0"))["addresses"] == ["127.0.0.1"]
    monkeypatch.setenv("TAILCUT_SOCKET_IFNAME", "absent0")
    with pytest.raises(ConfigError, match=r"socket_ifname='absent0' is not an interface.*this host has .*lo"):
        Group(0, 1, FileStore(tmp_path))
