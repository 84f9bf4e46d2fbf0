"""attach under torchrun: the same training as with plain DDP, its state, what it says, what it refuses."""

from __future__ import annotations

import re

import pytest

from tests.launch import Run, torchrun

# Gloo and tailcut add the same numbers in another order. With two ranks there is only one, and division by
# two is exact: equal to the last bit. With more, the sum is off by a few units in the last place of the
# gradient, and parameters (all below 1/2 here) by a few of theirs: 2**-25 in float32, 2**-9 in bfloat16 and
# 2**-12 in float16, where Gloo rounds at every addition. Eight to sixteen units are allowed; a gradient that
# is summed instead of averaged, or lacks a rank, is off by more than 0.01.
FLOAT32, BFLOAT16, FLOAT16 = 2.0**-21, 2.0**-6, 2.0**-9

MODES = {
    "accumulation_without_sync": FLOAT32,
    "unused_parameters": FLOAT32,
    "gradients_as_views_of_their_bucket": FLOAT32,
    "static_graph": FLOAT32,
    "uneven_inputs_with_join": FLOAT32,
    "bfloat16": BFLOAT16,
    "float16": FLOAT16,
    "scaled_loss_with_inf_on_one_rank": FLOAT32,
    "clipped_gradients": FLOAT32,
    "compiled": FLOAT32,
    "one_parameter_far_above_the_cap": FLOAT32,
    "a_cap_of_nothing": FLOAT32,
    "rebuilt_buckets": FLOAT32,
    "rebuilt_buckets_on_two_lanes": FLOAT32,
    "two_dtypes": BFLOAT16,
    "two_models_in_turns": FLOAT32,
    "two_models_interleaved": FLOAT32,
}
ON_FOUR = {mode: tolerance for mode, tolerance in MODES.items() if mode != "compiled"}  # which is slow
PLANES = ("unused_parameters", "bfloat16", "scaled_loss_with_inf_on_one_rank", "rebuilt_buckets_on_two_lanes")
# Bounds that are learned leave a rank out that does not get to run on a busy host, and what is equal to the
# last bit does not depend on the host.
WAITING = {"TAILCUT_ADAPTIVE": "0"}
NOISE = ("Traceback", "terminate called", "FATAL", "leaked", "Exception ignored", "tailcut: op")


def checked(run: Run) -> Run:
    assert run.code == 0, run.err
    errors = [result["error"] for rank in run.results for result in rank.values() if "error" in result]
    assert not errors, errors[0]
    assert not [word for word in NOISE if word in run.err], run.err
    return run


@pytest.fixture(scope="module")
def two() -> Run:
    return checked(torchrun(2, "modes", env=WAITING))


@pytest.fixture(scope="module")
def four() -> Run:
    modes = ("fifty_steps", *ON_FOUR, "the_last_ranks_as_a_group_of_their_own")
    return checked(torchrun(4, "modes", *modes, env=WAITING))


@pytest.fixture(scope="module")
def eight() -> Run:
    return checked(torchrun(8, "modes", "fifty_steps", env=WAITING))


@pytest.fixture(scope="module")
def planes() -> Run:
    """As between hosts."""
    env = {**WAITING, "TAILCUT_CODEC": "planes", "TAILCUT_PLANES": "16"}
    return checked(torchrun(3, "modes", "fifty_steps", *PLANES, env=env))


@pytest.fixture(scope="module")
def habits() -> Run:
    return checked(torchrun(2, "habits", env={"TAILCUT_DEADLINE_S": "7.5"}))


def assert_same_training(run: Run, name: str, tolerance: float) -> None:
    results = [rank[name] for rank in run.results if rank[name]]
    assert all(result["finite"] for result in results)
    assert len({result["digest"] for result in results}) == 1  # replicas are bit-identical
    assert [result["lost"] for result in results] == [0] * len(results)
    assert max(result["difference"] for result in results) <= tolerance


def test_fifty_steps_on_two_ranks_equal_those_of_gloo_to_the_last_bit(two: Run) -> None:
    assert_same_training(two, "fifty_steps", 0.0)


def test_fifty_steps_on_four_ranks_equal_those_of_gloo(four: Run) -> None:
    assert_same_training(four, "fifty_steps", FLOAT32)


@pytest.mark.long
def test_fifty_steps_on_eight_ranks_equal_those_of_gloo(eight: Run) -> None:
    assert_same_training(eight, "fifty_steps", FLOAT32)


@pytest.mark.parametrize("mode", ["fifty_steps", *PLANES])
def test_ddp_trains_with_planes_as_with_gloo(planes: Run, mode: str) -> None:
    # 16 planes err by 3e-5 of a gradient's norm in each step.
    assert_same_training(planes, mode, BFLOAT16 if mode == "bfloat16" else 2.0**-13)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_ddp_trains_as_with_gloo_on_two_ranks(two: Run, mode: str) -> None:
    # Gloo halves before it adds: float16 gradients below 2**-14 lose a bit by that.
    assert_same_training(two, mode, FLOAT16 if mode == "float16" else 0.0)


@pytest.mark.parametrize(("mode", "tolerance"), ON_FOUR.items(), ids=ON_FOUR)
def test_every_mode_of_ddp_trains_as_with_gloo_on_four_ranks(four: Run, mode: str, tolerance: float) -> None:
    assert_same_training(four, mode, tolerance)


def test_a_group_that_is_not_the_default_averages_over_its_own_ranks(four: Run) -> None:
    assert four.results[0]["the_last_ranks_as_a_group_of_their_own"] == {}
    assert_same_training(four, "the_last_ranks_as_a_group_of_their_own", FLOAT32)


def test_a_rank_alone_keeps_its_gradients(two: Run) -> None:
    for rank in two.results:
        assert rank["every_rank_alone"]["difference"] == 0.0
    assert len({rank["every_rank_alone"]["digest"] for rank in two.results}) == 2


def test_a_parameter_that_nobody_used_has_no_gradient_as_with_gloo(two: Run) -> None:
    for rank in two.results:
        plain, ours = rank["unused_parameters"]["notes"]
        assert ours == plain
        assert all(step[-1] for step in ours)


def test_an_inf_on_one_rank_makes_every_scaler_skip_that_step(four: Run) -> None:
    for rank in four.results:
        plain, ours = rank["scaled_loss_with_inf_on_one_rank"]["notes"]
        assert ours == plain
        assert [skipped for skipped, _ in ours] == [False, False, True, False, False, False]


@pytest.mark.parametrize("mode", ["rebuilt_buckets", "rebuilt_buckets_on_two_lanes"])
def test_buckets_were_rebuilt_after_the_first_step(two: Run, mode: str) -> None:
    for rank in two.results:
        _, ops = rank[mode]["notes"]
        assert ops[0] == 1
        assert ops[1] > 2
        assert set(ops[1:]) == {ops[1]}


def test_a_bucket_is_known_by_a_parameter_in_it_not_by_its_place(two: Run) -> None:
    for rank in two.results:
        names, (first, *later) = rank["keys_of_buckets"]["names"], rank["keys_of_buckets"]["keys"]
        for step in (first, *later):
            keys = [key for key, _ in step]
            assert set(keys) <= set(names)
            assert len(set(keys)) == len(keys)
        assert later[0] == later[1]
        assert len(later[0]) > len(first)


def test_two_dtypes_are_separate_buckets(two: Run) -> None:
    assert all(min(rank["two_dtypes"]["notes"][1]) >= 2 for rank in two.results)


# ---- state -------------------------------------------------------------------------------------------------


def test_ranks_vote_alike_on_a_step_that_costs_more_than_the_budget(habits: Run) -> None:
    for rank in habits.results:
        assert rank["votes_on_steps"]["votes"] == [True] * 13 + [False] * 13
        assert rank["votes_on_steps"]["lr_scale"] < 0.9
    assert [rank["votes_on_steps"]["heard"] for rank in habits.results] == [1, 0]


def test_rank_0_says_which_planes_are_sent_and_why(habits: Run) -> None:
    one, other = (rank["planes_are_told"] for rank in habits.results)
    assert "planes for contributions and" in one["said"]
    assert re.search(r"\): a step (took|of) ", one["said"])
    assert other["said"] == ""
    assert one["planes"] >= 3
    assert one["key"].endswith(("weight", "bias"))


def test_the_coordinates_of_matching_parameters_go_with_their_bucket(habits: Run) -> None:
    for rank in habits.results:
        result = rank["reliable_parameters"]
        assert [len(values) for values in result["found"]] == [64 + 64 + 5] * 3
        assert result["found"] == result["biases"]


def test_rank_0_warns_of_a_pattern_without_parameters(habits: Run) -> None:
    said = "tailcut: reliable='*.gone' matches the name of no parameter"
    assert [rank["reliable_parameters"]["warnings"] for rank in habits.results] == [[said], []]


def test_counts_go_on_after_a_checkpoint(habits: Run) -> None:
    for rank in habits.results:
        assert rank["counts_go_on_after_a_checkpoint"] == {"saved": 3, "ops": 5, "saved_again": 5}


@pytest.mark.parametrize("way", ["saved_and_loaded", "deeply_copied"])
def test_a_copy_of_the_model_can_be_attached_again(habits: Run, way: str) -> None:
    results = [rank[way] for rank in habits.results]
    assert len({digest for result in results for digest in result["digests"]}) == 1
    assert [result["ops"] for result in results] == [3, 3]


@pytest.mark.parametrize("way", ["saved_and_loaded", "deeply_copied"])
def test_the_attachment_in_a_copy_only_keeps_the_counts(habits: Run, way: str) -> None:
    for rank in habits.results:
        assert not rank[way]["inner_enabled"]
        assert rank[way]["inner_ops"] == 3
        assert rank[way]["inner_resync"].startswith(
            "ConfigError: this attachment has no model: it was pickled"
        )


@pytest.mark.parametrize(
    ("case", "lr"),
    [
        ("resync_with_momentum", 0.1),
        ("resync_with_adam", 0.01),
        ("resync_with_a_tensor_as_learning_rate", 0.01),
    ],
)
def test_resync_makes_a_disturbed_replica_bit_identical_again(habits: Run, case: str, lr: float) -> None:
    one, other = (rank[case] for rank in habits.results)
    assert one["digests"][0] != other["digests"][0]
    assert one["digests"][1:] == other["digests"][1:]
    assert one["digests"][0] == one["digests"][1]  # the source itself is left as it was
    assert one["lr"] == other["lr"] == pytest.approx(lr)


def test_resync_brings_a_rank_without_optimizer_state_back(habits: Run) -> None:
    one, other = (rank["resync_of_a_rank_without_state"] for rank in habits.results)
    assert one["digests"] == other["digests"]


def test_resync_copies_from_the_rank_it_is_told(habits: Run) -> None:
    for rank in habits.results:
        assert rank["resync_from_another_rank_and_in_bfloat16"]["values"] == [1.0]


# ---- what it says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "cause", "remedy"),
    [
        ("warns_of_buffers", "broadcast of buffers", "sync_buffers=False"),
        ("warns_of_unused_parameters", "map of used parameters", "find_unused_parameters=False"),
        ("warns_of_sync_batch_norm", "SyncBatchNorm", "BatchNorm"),
    ],
)
def test_rank_0_warns_of_what_still_blocks(habits: Run, case: str, cause: str, remedy: str) -> None:
    (text,), silent = (rank[case]["warnings"] for rank in habits.results)
    assert cause in text
    assert remedy in text.partition(cause)[2]
    assert silent == []


def test_nothing_that_blocks_is_nothing_to_warn_of(habits: Run) -> None:
    assert [rank["warns_of_nothing"]["warnings"] for rank in habits.results] == [[], []]


def test_ddp_itself_takes_no_sync_batch_norm_on_the_cpu(habits: Run) -> None:
    """Why no training with it is tested here. When this fails, add one to the modes."""
    assert "only work with GPU modules" in habits.results[0]["warns_of_sync_batch_norm"]["on_cpu"]


def test_the_effective_configuration_is_printed_once_by_rank_0(habits: Run) -> None:
    lines = [line for line in habits.err.splitlines() if line.startswith("tailcut ")]
    lines = [line for line in lines if "seed=4711" not in line]
    assert len(lines) == len(set(lines))
    assert sum("deadline_s=7.5" in line for line in lines) == 1
    assert sum("deadline_s=9.0" in line for line in lines) == 1
    assert all("2 ranks on 1 host" in line for line in lines)


def test_an_argument_wins_over_the_environment(habits: Run) -> None:
    for rank in habits.results:
        assert rank["an_argument_wins"]["deadlines_s"] == [7.5, 9.0, 9.0]


def test_rank_0_of_a_group_speaks_for_it_whatever_its_global_rank(habits: Run) -> None:
    assert habits.err.count("seed=4711") == 1


# ---- what it refuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("not-ddp", ["DistributedDataParallel", "Sequential", "HSDP"]),
        ("float64", ["0.weight", "torch.float64", ".float()"]),
        ("sparse", ["words", "sparse=False"]),
        ("setting", ["'deadline'", "did you mean deadline_s?"]),
    ],
)
def test_what_cannot_be_attached_is_refused_with_the_remedy(habits: Run, what: str, words: list[str]) -> None:
    for rank in habits.results:
        text = rank["refusals"]["refused"][what]
        assert text.startswith("ConfigError: ")
        assert [word for word in words if word not in text] == []
        assert rank["refusals"]["left_open"] == [0, 0]


def test_the_reducer_of_compiled_autograd_is_refused_with_the_remedy(two: Run) -> None:
    for rank in two.results:
        text = rank["python_reducer"]["refused"]
        assert text.startswith("ConfigError: torch._dynamo.config.optimize_ddp='python_reducer'")
        assert "set it to 'ddp_optimizer'" in text


def test_settings_come_before_those_of_the_configuration_beside_them(habits: Run) -> None:
    for rank in habits.results:
        assert rank["settings_beside_a_configuration"]["config"] == [3, 8, 0.5]


def test_a_hook_that_is_there_already_leaves_nothing_open_and_works_on(habits: Run) -> None:
    results = [rank["a_hook_is_there_already"] for rank in habits.results]
    assert all("can only be called once" in result["refused"] for result in results)
    assert [result["left_open"] for result in results] == [[0, 0]] * 2
    assert results[0]["digest"] == results[1]["digest"]


def test_ranks_with_differing_configurations_are_all_told_what_differs(habits: Run) -> None:
    for rank in habits.results:
        text = rank["configs_differ"]["refused"]
        assert text.startswith("ConfigError: ")
        assert "seed: rank 0 has 0, rank 1 has 1" in text
        assert rank["configs_differ"]["left_open"] == [0, 0]


def test_ranks_with_differing_buckets_get_one_error_in_backward_and_can_go_on(habits: Run) -> None:
    results = [rank["lengths_differ"] for rank in habits.results]
    for number, result in enumerate(results):
        assert result["refused"].startswith("RuntimeError: ")
        assert f"ConfigError: op 3: this rank (rank {number}) passed" in result["refused"]
        assert "every rank must pass the same length" in result["refused"]
    assert results[0]["digest"] == results[1]["digest"]


def test_after_close_backward_raises_and_nothing_is_open(habits: Run) -> None:
    for rank in habits.results:
        result = rank["after_close"]
        # A socket, its engine, two threads of the reducer, that of rolling resync and that of stalls.
        assert result["opened"] == [1, 5]
        assert result["left_open"] == [0, 0]
        assert "ClosedError: the group is closed" in result["refused"]
        assert result["ops"] == 3


def test_a_model_that_goes_out_of_use_takes_its_threads_and_sockets_along(habits: Run) -> None:
    for rank in habits.results:
        assert rank["dropped"] == {"left_open": [0, 0]}


def test_leaving_the_block_closes(habits: Run) -> None:
    assert [rank["with_a_block"]["sockets"] for rank in habits.results] == [[1, 0]] * 2


def test_disabled_it_is_plain_ddp_and_opens_nothing(habits: Run) -> None:
    results = [rank["disabled"] for rank in habits.results]
    assert len({digest for result in results for digest in result["digests"]}) == 1
    for result in results:
        assert result["opened"] == [0, 0]
        assert not result["enabled"]
        assert (result["counted"], result["reports"]) == (False, 0)


def test_a_wrong_value_of_tailcut_disable_is_refused(habits: Run) -> None:
    for rank in habits.results:
        text = rank["disabled_by_nonsense"]["refused"]
        assert text == "ConfigError: TAILCUT_DISABLE='maybe' is neither 0 nor 1"
