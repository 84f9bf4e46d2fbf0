"""The backend "tailcut" under real torchrun: every collective, subgroups, meshes, HSDP, errors, the end."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.launch import Run, torchrun, workers
from tests.netns import ADDRESSES


@cache
def collectives() -> Run:
    """All cases in one launch of four workers. Means are checked to the bit, so no bound is learned: a worker
    that does not get to run for some milliseconds would cost its contribution."""
    return torchrun(4, "collectives", env={"TAILCUT_ADAPTIVE": "0", "TAILCUT_DEADLINE_S": "60"})


def results(case: str) -> list[dict[str, Any]]:
    run = collectives()
    ranks = [result.get(case, {"error": f"did not come so far\n{run.err}"}) for result in run.results]
    assert not [r["error"] for r in ranks if "error" in r], ranks
    return ranks


@pytest.mark.long
def test_three_thousand_mixed_collectives_are_right_and_none_hangs() -> None:
    for rank in results("mixed"):
        assert rank["wrong"] == []
        assert rank["lost"] == 0


def test_only_means_of_large_floating_point_tensors_are_bounded() -> None:
    for rank in results("mixed"):
        assert rank["ops"] == rank["bounded"] > 0


def test_a_subgroup_has_its_own_configuration_and_a_mesh_inherits_the_backend() -> None:
    for index, rank in enumerate(results("subgroups")):
        assert rank["small"] == [index // 2 * 2 + 0.5] * 3
        assert rank["small_ops"] == 1
        assert rank["outer"] == index % 2 + 1
        assert (rank["backend"], rank["outer_ops"]) == ("tailcut", 1)
        assert "pg_options takes a tailcut.Config, not str" in rank["options_refused"]


def test_ranks_in_different_numbers_of_groups_find_each_other() -> None:
    for index, rank in enumerate(results("uneven")):
        assert rank["means"] == [index % 2 + 1, index // 2 * 2 + 0.5]


def test_hsdp_averages_its_replicas_through_tailcut() -> None:
    for rank in results("hybrid_sharding"):
        assert rank["difference"] <= 1e-6  # of parameters around 0.06: rounding of two orders of addition
        assert rank["ops"] > 0


def test_sums_of_ddp_are_exact_unless_the_group_opts_in() -> None:
    for rank in results("ddp"):
        assert rank["exact"]
        assert rank["exact_ops"] == 0
        assert rank["difference"] <= 1e-6
        assert rank["bounded_ops"] > 0


def test_warnings_point_at_the_line_that_made_the_process_group() -> None:
    for rank in results("alarms"):
        assert rank["places"] == ["collectives.py: told of the group", "collectives.py: told of the mesh"]


def test_a_rank_with_another_length_is_told_and_the_group_goes_on() -> None:
    odd, *others = results("mismatch")
    assert odd["told"].count("ConfigError") == 1
    assert "this rank (rank 0) passed 66536 coordinates" in odd["told"]
    assert {rank["told"] for rank in others} == {"was not refused"}
    assert all(rank["afterwards"] for rank in (odd, *others))


def test_a_process_can_begin_again_with_the_same_store() -> None:
    for rank in results("again"):
        assert all(rank["averages"])
        assert rank["ops"] == 1


def test_the_end_is_clean_and_rank_0_says_once_what_it_does() -> None:
    run = collectives()
    assert run.code == 0
    announced = [line for line in run.err.splitlines() if "process group 0" in line]
    assert len(announced) == 1
    assert "4 ranks on 1 host" in announced[0]
    for alarm in ("Warning", "terminate", "leaked", "Traceback", "FATAL"):
        assert alarm not in run.err


def test_disabled_it_is_plain_gloo() -> None:
    run = torchrun(2, "plain", env={"TAILCUT_DISABLE": "1"})
    assert run.code == 0, run.err
    for rank in run.results:
        assert rank == {"backend": "ProcessGroupGloo", "mean": 0.5, "sum": 1.0, "threads": 0, "sockets": 0}
    assert "tailcut" not in run.err


IMPORTS = {
    "torch-first": "import torch, tailcut, tailcut.pytorch",
    "tailcut-first": "import tailcut; tailcut.attach; import torch",
    "adapter-first": "import tailcut.pytorch.attach, torch",
    "torch-alone": "import sys, torch; assert 'tailcut._native' not in sys.modules",
}


@pytest.mark.parametrize("imports", IMPORTS.values(), ids=IMPORTS)
def test_the_name_is_known_in_whatever_order_things_are_imported(imports: str) -> None:
    code = f"{imports}; assert 'tailcut' in torch.distributed.Backend.backend_list"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_wrong_value_of_the_switch_is_refused() -> None:
    run = torchrun(1, "plain", env={"TAILCUT_DISABLE": "maybe"})
    assert run.code != 0
    assert "TAILCUT_DISABLE='maybe' is neither 0 nor 1" in run.err


def test_an_elastic_restart_finds_the_new_peers_and_not_the_old_ones() -> None:
    run = torchrun(2, "restarted", launcher=("--max-restarts=2",))
    assert run.code == 0, run.err
    assert [rank["mean"] for rank in run.results] == [0.5, 0.5]
    assert [rank["life"] for rank in run.results] == ["2", "2"]


def test_hosts_whose_names_mean_127_0_1_1_find_each_other(
    tmp_path: Path, two_hosts: tuple[str, str], loopback_names: None
) -> None:
    """As Debian has it in /etc/hosts. Gloo by itself would tell the other host to connect to 127.0.1.1."""
    env = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": ""}
    with workers(tmp_path, 2, "plain", env=env, hosts=two_hosts) as ranks:
        for rank in ranks:
            code, err = rank.end()
            assert code == 0, err
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert results[0]["mean"] == results[1]["mean"] == pytest.approx(0.5, rel=1e-4)  # planes, between hosts
    assert [result["sum"] for result in results] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("ending", "code"), [("falls-off-the-end", 0), ("destroys", 0), ("raises", 1), ("terminates", -15)]
)
def test_a_process_group_ends_with_its_process(tmp_path: Path, ending: str, code: int) -> None:
    with workers(tmp_path, 2, "group_ending", f"file://{tmp_path}/store", ending) as ranks:
        for rank in ranks:
            ended, err = rank.end()
            assert ended == code, err
            for alarm in ("Warning", "terminate called", "leaked", "FATAL", "Aborted"):
                assert alarm not in err
