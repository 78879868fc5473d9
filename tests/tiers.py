"""Which tests a newcomer's `bash run_tests.sh` leaves out: the marker `full`, which `--all` and named files run too.

Of the files below it makes only the tests named, one real case of each promise; the others repeat it on another model, stage,
launcher, number of ranks or fault. A test is named with its parameters' id where one case tells enough.
"""

# fmt: off
KEPT = {
    "callbacks/test_signalled_evaluation.py": (),
    "contracts/test_auto_micro_batch.py": ("test_on_a_cpu_a_run_says_what_auto_is_and_trains",),
    "contracts/test_benchmarks_in_training.py": ("test_a_record_that_cannot_be_written_is_told_and_the_run_goes_on", "test_core_is_scored_at_its_cadence_and_at_the_end_and_changes_nothing[modern]"),
    "contracts/test_bpb_of_sources.py": (),
    "contracts/test_chat_tasks_in_training.py": ("test_two_ranks_have_the_chat_scores_of_one",),
    "contracts/test_checkpoint_is_a_model.py": ("test_checkpoints_and_the_finished_model_load_without_this_package[modern-False]",),
    "contracts/test_exact_resume.py": ("test_a_run_killed_in_the_middle_ends_bitwise_as_the_uncut_one[pretrain-modern-2-more2]", "test_a_run_killed_in_the_middle_ends_bitwise_as_the_uncut_one[pretrain-gpt2-1-more0]"),
    "contracts/test_going_on_from_the_hub.py": ("test_every_revision_that_training_pushed_loads_without_our_package_with_the_checkpoints_logits[modern]",),
    "contracts/test_launched_recipe.py": (),
    "contracts/test_logged_numbers.py": ("test_every_number_that_a_mixture_writes_is_in_the_registry_and_says_what_its_formula_says",),
    "contracts/test_lost_conversations.py": (),
    "contracts/test_one_step_any_shape.py": ("test_the_losses_of_20_steps_do_not_depend_on_micro_batch_or_processes[pretrain-modern]",),
    "contracts/test_own_models.py": ("test_continued_pretraining_keeps_tokenizer_and_vocabulary_and_begins_documents_as_the_model_does[qwen3]", "test_generation_ends_at_the_template_s_end_of_turn_where_the_model_knows_only_the_text_s"),
    "contracts/test_plan_holds.py": ("test_parameters_steps_tokens_and_flops_are_those_planned[modern-sft]",),
    "contracts/test_run_life.py": ("test_a_signal_to_one_of_two_ranks_stops_both_at_one_step", "test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used", "test_a_gradient_that_is_not_finite_stops_before_the_update_and_names_the_rows"),
    "contracts/test_trackers.py": ("test_tensorboard_holds_what_counts_as_float32",),
    "contracts/test_trained_text.py": ("test_bits_per_byte_of_an_interval_are_those_of_its_rows_under_the_weights_of_each_step[pretrain-modern-2-more0]",),
    "data/test_losses.py": (),
    "data/test_seals.py": (),
    "evals/test_bpb.py": ("test_a_rank_without_any_text_still_takes_part",),
    "evals/test_chat_tasks.py": ("test_a_random_model_scores_at_chance_within_its_interval", "test_programs_that_pass_their_tests_score_one_in_the_sandbox", "test_results_say_on_what_they_stand"),
    "evals/test_contamination_in_runs.py": ("test_a_run_tells_which_items_stand_in_its_text_and_the_score_without_them[1]",),
    "evals/test_core_score.py": ("test_the_reference_weights_answer_as_under_nanochats_evaluator",),
    "evals/test_sandbox.py": ("test_a_user_without_privileges_gets_the_same_walls", "test_where_the_walls_do_not_suffice_execution_is_refused_unless_unsafe_exec", "test_nothing_survives_when_the_evaluation_is_killed"),
    "faults/test_campaigns.py": (),
    "faults/test_cluster_page.py": (),
    "faults/test_environments.py": (),
    "faults/test_hangs.py": ("test_a_rank_that_sleeps_is_named_with_its_stage_and_every_stack_is_written[data-0-1]",),
    "faults/test_leaks.py": (),
    "faults/test_numerics.py": ("test_weights_that_are_not_finite_are_not_started_from", "test_more_skipped_steps_than_the_recipe_allows_stop_the_run"),
    "faults/test_out_of_memory.py": (),
    "faults/test_secrets.py": (),
    "faults/test_services.py": (),
    "faults/test_signals.py": ("test_a_signal_to_one_rank_that_waits_for_the_other_before_step_1_ends_both",),
    "faults/test_storage.py": (),
    "faults/test_stragglers.py": (),
    "faults/test_wrong_files.py": (),
    "hardware/test_kept_memory.py": (),
    "hostile/test_campaign.py": ("test_marking_leaves_its_mark",),
    "hostile/test_code_gate.py": ("test_code_of_a_pulled_repository_is_not_run", "test_serve_trusts_code_only_when_it_is_told_to"),
    "hostile/test_refused_models.py": (),
    "hub/test_export_of_a_run.py": (),
    "hub/test_hub.py": ("test_push_creates_a_private_repository_with_all_files_in_one_commit_and_verifies_them", "test_no_uploaded_byte_holds_the_token", "test_bytes_damaged_on_the_hub_are_noticed", "test_a_damaged_model_is_not_pushed", "test_a_secret_in_any_file_stops_the_push_before_the_first_request"),
    "hub/test_space.py": (),
    "launching/test_launch.py": ("test_ranks_save_and_end_when_the_script_itself_is_killed",),
    "model/test_compile.py": (),
    "model/test_kernels_that_skip_blocks.py": (),
    "model/test_vllm_backend.py": (),
    "monitor/test_watched_run.py": (),
    "preflight/test_before_training.py": (),
    "preflight/test_shared.py": (),
    "process/test_other_systems.py": ("test_a_lock_of_filelock_keeps_others_out_and_ends_with_its_process", "test_no_module_imports_one_that_other_systems_lack_without_a_way_around"),
    "recipe/test_sizes_of_transformers.py": ("test_a_mixture_scales_by_the_experts_that_a_token_is_sent_to", "test_parameters_that_are_planned_are_those_that_are_built[qwen3]"),
    "report/test_comparison_page.py": ("test_the_page_has_the_markdowns_sections_in_its_order_and_the_warning_above_them",),
    "sources/test_files_of_other_programs.py": ("test_every_text_of_a_file_is_read_as_its_writer_put_it_in", "test_every_conversation_of_a_file_is_read_as_its_writer_put_it_in"),
    "sources/test_hub_files.py": ("test_files_of_a_layout_like_fineweb_edu_s_keep_their_order_and_fingerprint", "test_without_the_hub_a_cached_dataset_goes_on_and_says_so"),
    "sources/test_public_datasets.py": (),
    "sources/test_splits.py": (),
    "tokenizer/test_own_template.py": ("test_the_tokenizer_stays_as_the_model_has_it[llama]",),
    "tokenizer/test_template_bounds.py": ("test_a_template_that_would_take_all_time_or_memory_ends_in_a_sentence[lists in lists]",),
    "training/test_compiled_run.py": (),
    "training/test_embedding_dtype.py": (),
    "training/test_muon_shared.py": (),
}
# fmt: on


def is_full(nodeid: str) -> bool:
    """Return whether only the full suite makes a test, by its node id."""
    path, _, test = nodeid.removeprefix("tests/").partition("::")
    return path in KEPT and not {test, test.partition("[")[0]} & set(KEPT[path])
