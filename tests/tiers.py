"""Which tests run when: `bash run_tests.sh` leaves out those marked full, `--all` runs them too; slow ones are run by hand.

A file named here is full but for the tests that stand beside it, one or two that show its promise. A test that starts real runs
(fixture `runner`) is marked run, which `make quick` leaves out. Seconds of a file: its tests together, one process of two
beside other work (docs/log.md, 2026-11-23).
"""

import pytest

FULL: dict[str, tuple[str, ...]] = {
    "contracts/test_auto_micro_batch.py": ("test_on_a_cpu_a_run_says_what_auto_is_and_trains",),  # 51 s
    "contracts/test_benchmarks_in_training.py": ("test_a_failing_benchmark_is_told_and_the_run_goes_on[1]",),  # 160
    "contracts/test_chat_tasks_in_training.py": ("test_the_questions_of_a_subject",),  # 55
    "contracts/test_checkpoint_is_a_model.py": ("[modern-True]",),  # 32
    "contracts/test_exact_resume.py": ("[pretrain-modern-1-", "[sft-modern-1-"),  # 240
    "contracts/test_going_on_from_the_hub.py": ("test_a_pulled_run_goes_on_bitwise",),  # 247
    "contracts/test_launched_recipe.py": (),  # 32
    "contracts/test_logged_numbers.py": ("test_every_number_that_a_mixture_writes",),  # 72
    "contracts/test_one_step_any_shape.py": ("[pretrain-modern]", "[sft-gpt2]"),  # 113
    "contracts/test_own_models.py": ("test_rows_that_no_text_has_shrink",),  # 329
    "contracts/test_plan_holds.py": ("[modern-sft]",),  # 27
    "contracts/test_run_life.py": (  # 384
        "test_a_gradient_that_is_not_finite_stops",
        "test_a_damaged_newest_checkpoint_is_named",
        "test_a_finished_run_says_so",
    ),
    "contracts/test_trained_text.py": ("test_bits_per_byte_of_an_interval_are_those_of_its_rows_under_the_weights_of_each_step[sft-llama",),  # 54
    "data/test_losses.py": ("test_the_scored_bytes_are_those_of_the_labels", "test_shards_sealed_without_lengths"),  # 96
    "evals/test_bpb.py": ("test_bpb_on_two_gloo_ranks_equals_one_process",),  # 28
    "evals/test_chat_tasks.py": ("test_a_random_model_scores_at_chance", "test_letters_and_texts_are_the_same"),  # 71
    "evals/test_contamination_in_runs.py": ("test_a_run_tells_which_items_stand_in_its_text_and_the_score_without_them[1]",),  # 171
    "evals/test_core_score.py": ("test_every_item_is_answered_as_when_it_is_scored_alone[modern-crop]",),  # 43
    "faults/test_campaigns.py": (),  # 397
    "faults/test_cluster_page.py": (),  # 63
    "faults/test_hangs.py": ("test_a_rank_that_sleeps_is_named_with_its_stage_and_every_stack_is_written[data-0-1]",),  # 148
    "faults/test_numerics.py": (  # 168
        "test_weights_that_are_not_finite",
        "test_a_checkpoint_with_a_number_that_is_not_finite",
        "test_more_skipped_steps",
    ),
    "faults/test_out_of_memory.py": (),  # 40
    "faults/test_secrets.py": (),  # 54
    "faults/test_services.py": ("test_two_publishers_are_kept_apart",),  # 75
    "faults/test_signals.py": ("[torchrun-agent]",),  # 110
    "faults/test_storage.py": ("_leaves_no_half_one[removed]",),  # 108
    "hostile/test_campaign.py": (),  # 68
    "hostile/test_code_gate.py": ("test_code_of_a_pulled_repository", "pretrain: start_from a model of its own code"),  # 81
    "hub/test_hub.py": (  # 367
        "test_push_creates_a_private_repository",
        "test_no_uploaded_byte_holds_the_token",
        "test_bytes_damaged_on_the_hub",
    ),
    "report/test_comparison_page.py": ("[40-3000]",),  # 39
    "sources/test_files_of_other_programs.py": ("test_a_large_file_is_read_in_little_memory", "pandas"),  # 74
    "sources/test_hub_files.py": ("test_only_the_files_that_are_reached", "test_an_overloaded_hub_is_asked_again"),  # 112
    "tokenizer/test_own_template.py": ("test_rows_are_those_of_trl", "[qwen3]"),  # 95
    "training/test_compiled_run.py": (),  # 27
    "training/test_embedding_dtype.py": (),  # 45
}  # fmt: skip


def mark(items: list[pytest.Item], *, whole_files: bool) -> None:
    """Mark the collected tests full and run. Raises UsageError where a test that is to be kept is gone."""
    unseen = {(path, part) for path, parts in FULL.items() for part in parts}
    collected = set()
    for item in items:
        path = item.nodeid.partition("::")[0].removeprefix("tests/")
        kept = FULL.get(path)
        if kept is not None:
            collected.add(path)
            found = {(path, part) for part in kept if part in item.name}
            unseen -= found
            if not found:
                item.add_marker(pytest.mark.full)
        if "runner" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.run)
    gone = sorted(f"{path}: {part}" for path, part in unseen if path in collected)
    if whole_files and gone:
        raise pytest.UsageError(f"tests/tiers.py names tests that are not there: {', '.join(gone)}")
