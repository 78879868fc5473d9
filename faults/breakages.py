"""Break the code in one place, see a test fail: `python -m faults.breakages [--only NAME ...] [--list]`.

Each breakage is one line of the program replaced by a wrong one, and the test that must fail then. The line is looked for in
all of the program's files, and the test by its name in all of the tests, so that both may move from file to file. It must
stand in exactly one place; one that the program has outgrown is replaced by another of the same subject.

The program is copied (what git tracks, as it lies here); first all the tests must pass on the copy as it is. Names of
breakages are given by a part of them. Leaves with 1 unless every breakage was caught.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
PROGRAM = ("pipeline", "accelerate_configs", "benchmarks")
LONGEST_S = 240  # of one call of pytest with one test


@dataclass(frozen=True)
class Breakage:
    """name: what is broken, a sentence. code: a part of one line of the program; instead: what replaces it. test: the name
    of the test function of which a case must fail then."""

    name: str
    code: str
    instead: str
    test: str


# fmt: off
BREAKAGES = (
    # Runs on disk
    Breakage("a checkpoint with other content than was sealed counts as whole", 'elif sha256_file(path) != expected["sha256"]:', "elif False:", "test_files_swapped_between_two_checkpoints_are_found"),
    Breakage("rotation keeps the oldest checkpoints", "[-max(keep, 1) :]", "[: max(keep, 1)]", "test_rotation_keeps_the_newest_by_number_not_by_time"),
    Breakage("rows that a later attempt made again still count", 'return step <= start and (start > 0 or "event" in row)', "return True", "test_rows_that_a_later_attempt_made_again_are_void"),
    Breakage("a file is written in place instead of beside it", 'temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")', "temporary = path", "test_a_failed_replacement_keeps_the_old_file"),
    # Hardware
    Breakage("a container's share of the cores is not seen", "return min(affinity, _quota() or affinity)", "return affinity", "test_a_container_quota_limits_cores_and_memory"),
    Breakage("a GPU that only resembles a known one gets its peak", "re.fullmatch(row.device_name, device_name.strip())", "re.match(row.device_name, device_name.strip())", "test_a_device_that_only_resembles_a_known_one_has_no_peak"),
    # Recipe
    Breakage("an inherited mapping is replaced as a whole", "values[key] = _merge(values[key], item) if key in values else item", "values[key] = item", "test_a_chain_of_extends_merges_sections_key_by_key_and_replaces_lists"),
    Breakage("a limit of a number lets the number beside it pass", '"above": "gt"', '"above": "ge"', "test_a_wrong_recipe_is_refused_with_place_and_cure"),
    Breakage("FLOPs leave the backward pass out", "linear=6 * (scaling + smear_inputs),", "linear=2 * (scaling + smear_inputs),", "test_gpt2_flops_are_the_known_ones"),
    # Monitor
    Breakage("energy takes the last power for the whole interval", "self.joules += elapsed * (watts + self._last[1]) / 2", "self.joules += elapsed * watts", "test_energy_of_known_power_at_uneven_samples_matches_to_a_thousandth"),
    Breakage("numbers of a GPU are sums over its samples instead of means", "self.sums[name] / counts[name] for name", "self.sums[name] for name", "test_totals_are_means_over_the_samples"),
    # Sources
    Breakage("two messages of the user in a row are trained on", 'if role == "user" and previous == "user":', "if False:", "test_a_conversation_that_teaches_nothing_is_left_out_and_named"),
    Breakage("held-out rows stand at the same place of every period", "return drawn % period == place", "return place == 0", "test_held_out_rows_are_not_the_same_place_of_every_period"),
    Breakage("copies of a held-out file are trained on", "rest = [file for file in train if file.sha256 not in contents]", "rest = list(train)", "test_copies_of_a_file_drawn_are_held_out_with_it"),
    # Tokenizer
    Breakage("control tokens count as bytes of text", "elif not added[i].special:", "else:", "test_control_tokens_and_ids_that_do_not_exist_have_no_bytes"),
    Breakage("text that spells a control token is trained as it is", "(escape(text) for text in texts)", "(text for text in texts)", "test_a_text_full_of_control_strings_grows_no_id_of_that_name"),
    Breakage("a message of a user can write a control token", 'return self._control.sub(f"{OPEN}\\\\g<0>{CLOSE}", text)', "return text", "test_no_content_yields_a_control_id"),
    # Data
    Breakage("a source that ended is begun anew instead of going on", "return sources, self.bases[sources] + block", "return sources, block", "test_a_source_that_ends_is_dropped_repeated_or_stops_the_run"),
    Breakage("positions go on over the beginning of a document", "return at - np.maximum.accumulate(np.where(starts_BT, at, 0), axis=1)", "return at - np.zeros_like(starts_BT, dtype=np.int64)", "test_isolated_documents_restart_their_positions_at_every_bos"),
    Breakage("ranks get the same rows", "first = (micro_step * world_size + rank) * rows", "first = micro_step * world_size * rows", "test_rows_of_a_step_do_not_depend_on_processes_or_micro_batch"),
    Breakage("an n-gram is found over the end of a text", "== self.texts[n - 1 :][:count])", "== self.texts[:count])", "test_no_ngram_spans_two_texts"),
    Breakage("users' words are trained on", "labels_BT[at] = np.where(bits(shard.trained[numbers], T + 1)[:, 1:], ids[:, 1:], np.int64(IGNORED))", "labels_BT[at] = ids[:, 1:]", "test_only_what_the_assistant_writes_is_trained_and_conversations_are_isolated"),
    # Model
    Breakage("packed documents see each other", "!= 1).cumsum(-1)", "> 1).cumsum(-1)", "test_packed_documents_do_not_see_each_other"),
    Breakage("rotary positions turn half of the channels the other way", "second * cosine - first * sine", "second * cosine + first * sine", "test_modern_restricted_to_nanochats_options_is_nanochat"),
    Breakage("the gradient of the loss leaves the softcap out", "gradient.mul_(torch.addcmul(one, capped, capped, value=-1.0, out=capped))", "pass", "test_the_chunked_loss_and_its_gradients_are_the_plain_ones"),
    # Generation
    Breakage("top_p leaves out the token that reaches it", "dropped_BV = share_BV.cumsum(-1) - share_BV >= top_p", "dropped_BV = share_BV.cumsum(-1) >= top_p", "test_top_k_and_top_p_keep_their_own_tokens_per_row"),
    Breakage("an expression of any length is calculated", "if len(expression) > LONGEST or not", "if not", "test_the_length_has_a_limit"),
    # Evaluations
    Breakage("special tokens count as text in bits per byte", "return bytes_BT, bytes_BT > 0", "return bytes_BT, is_target_BT", "test_loss_counts_special_targets_and_bpb_does_not"),
    Breakage("an item of CORE can be its own example", "return [place if place < index else place + 1 for place in drawn]", "return drawn", "test_examples_are_sampled_as_from_a_list_without_the_item"),
    Breakage("a program that says anything at its end has passed", 'return Execution(reason == "passed", reason, seconds)', "return Execution(bool(reason), reason, seconds)", "test_wrong_programs_fail_with_the_last_line_of_their_traceback"),
    Breakage("a number with commas is another number", 'return found[1].replace(",", "") if found else None', "return found[1] if found else None", "test_gsm8k_is_judged_by_the_first_number_behind_the_marks_without_commas"),
    # Training
    Breakage("the first step of the warm-up has a rate of zero", "multiplier = min(multiplier, (step + 1) / schedule.warmup_steps)", "multiplier = min(multiplier, step / schedule.warmup_steps)", "test_the_first_update_of_a_warm_up_has_a_rate_above_zero"),
    Breakage("Muon decays what the update grows", "agree = (direction * parameter).ge_(0)", "agree = (direction * parameter).le_(0)", "test_weight_decay_shrinks_only_what_the_update_shrinks_too"),
    Breakage("optimizer state comes back to another parameter", 'return [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]]', 'return list(zip([p for group in optimizer.param_groups for p in group["params"]], names.values(), strict=True))', "test_state_finds_its_parameter_by_name_whatever_the_order_of_the_groups"),
    Breakage("steps that were left out long ago count for ever", "self.skips = [s for s in self.skips if s > step - AMONG_STEPS] + [step]", "self.skips = self.skips + [step]", "test_steps_left_out_long_ago_no_longer_count"),
    # Callbacks
    Breakage("a rank gives up an evaluation alone", "is_signalled = self.agreed() if lockstep else self.signals.received", "is_signalled = self.signals.received", "test_ranks_that_score_in_lockstep_give_up_at_the_same_batch"),
    Breakage("samples that a kill left there are written again", "if prompt in there:", "if False:", "test_a_kill_between_two_prompts_loses_neither_and_repeats_neither"),
    Breakage("Python searches for cycles within a step", "gc.disable()", "pass", "test_cycles_are_collected_only_at_saves_evaluations_and_every_thousand_steps"),
    # Report
    Breakage("several comparisons each have the whole chance of a false call", "student_t(CHANCE / comparisons, freedom)", "student_t(CHANCE, freedom)", "test_several_comparisons_share_the_chance_of_a_false_call"),
    Breakage("a prediction leaves the noise of the predicted run out", "spread = 1 + (power / y) ** 2 *", "spread = (power / y) ** 2 *", "test_without_a_floor_the_fit_is_the_textbook_regression_with_its_interval"),
    Breakage("a loss that climbs above its start is healthy", "if pairs.max() > limit:", "if False:", "test_a_sign_is_named_just_beyond_its_threshold_and_not_just_within"),
    # Hub
    Breakage("a secret between two blocks of a file is uploaded", "kept = data[-_OVERLAP:]", 'kept = b""', "test_a_secret_between_two_blocks_of_a_large_file_is_found"),
    Breakage("a pickle inside of an archive is uploaded", 'return any(name.endswith(".pkl") for name in archive.namelist())', "return False", "test_pickles_are_refused_whatever_their_name"),
    Breakage("bytes that the Hub has damaged are taken for those that were sent", "if not path.exists() or sha256_file(path) != sums[name]]", "if not path.exists()]", "test_bytes_damaged_on_the_hub_are_noticed"),
    # Preflight
    Breakage("what a run keeps beside its checkpoints makes room for them", "there = folder_bytes(run.checkpoints) + folder_bytes(run.model)", "there = folder_bytes(folder)", "test_what_the_run_keeps_beside_its_checkpoints_makes_no_room_for_them"),
    Breakage("several processes are planned without the buckets of their gradients", "gradients *= 2", "gradients *= 1", "test_weights_and_gradients_are_counted_exactly_and_buckets_on_several_processes"),
    Breakage("two processes are started on one GPU", 'if plan.device.kind != "cpu" and local > plan.device.count:', "if False:", "test_more_processes_than_gpus_are_refused"),
    # Chat
    Breakage("half of the oldest turn stays in a conversation that is too long", "del messages[: turns[1]]", "del messages[: turns[1] - 1]", "test_a_turn_with_a_tool_call_is_left_out_as_a_whole"),
    # Launcher
    Breakage("a run with a wrong recipe is started again", "RESTARTABLE = (1, 70, ", "RESTARTABLE = (1, 64, 70, ", "test_a_crash_restarts_only_when_that_can_help_and_progress_was_made"),
    Breakage("overrides alone are taken for a recipe", 'if arguments and "=" not in arguments[0] and not', "if arguments and not", "test_the_default_recipe_is_used_when_only_overrides_are_given"),
)
# fmt: on


def places_of(code: str, root: Path) -> list[Path]:
    """Return the program's files that hold the code, each as often as it does."""
    files = sorted(file for folder in PROGRAM for file in (root / folder).rglob("*.py"))
    return [file for file in files for _ in range(file.read_text().count(code))]


def node_of(test: str, root: Path) -> str:
    """Return `file::test`. Raises LookupError unless one file has a function of that name."""
    files = [file for file in sorted((root / "tests").rglob("test_*.py")) if f"def {test}(" in file.read_text()]
    if len(files) != 1:
        raise LookupError(f"{len(files)} files have a test {test}")
    return f"{files[0].relative_to(root)}::{test}"


def copy_program(folder: Path) -> None:
    """Copy what git tracks, as it lies here: neither caches nor what another commit has."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # else it was removed and that is not committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def failed(nodes: list[str], folder: Path) -> tuple[bool | None, str]:
    """Return whether a test failed, None where they could not be run to their end, and the end of what pytest said."""
    # Without bytecode: a file that was changed back within the second would pass for the one before.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *nodes]
    limits = {"timeout": LONGEST_S * (1 if len(nodes) == 1 else 10)}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, **limits)
    except subprocess.TimeoutExpired:
        return None, "did not end in time"
    return {0: False, 1: True}.get(done.returncode), "\n".join((done.stdout + done.stderr).splitlines()[-15:])


def try_breakage(breakage: Breakage, folder: Path) -> tuple[str, str]:
    """Break the copy, run the test, put it back; "caught", "NOT CAUGHT" or "did not apply", and why."""
    places = places_of(breakage.code, folder)
    if len(places) != 1:
        return "did not apply", f"the line stands in {len(places)} places: {breakage.code}"
    (file,), sound = places, places[0].read_text()
    try:
        file.write_text(sound.replace(breakage.code, breakage.instead))
        has_failed, said = failed([node_of(breakage.test, folder)], folder)
    finally:
        file.write_text(sound)
    if has_failed:
        return "caught", ""
    return "NOT CAUGHT", f"{breakage.test} passed" if has_failed is False else said


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.breakages", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="breakages whose names hold one of these")
    parser.add_argument("--list", action="store_true", help="print the names and break nothing")
    options = parser.parse_args(argv)
    chosen = [b for b in BREAKAGES if not options.only or any(part in b.name for part in options.only)]
    if options.list:
        print("\n".join(breakage.name for breakage in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="breakages-") as name:
        folder = Path(name).resolve()
        copy_program(folder)
        has_failed, said = failed(sorted({node_of(breakage.test, folder) for breakage in chosen}), folder)
        if has_failed is not False:
            print(f"the tests fail on the program as it is, so nothing was tried:\n{said}")
            return 1
        print(f"the tests of {len(chosen)} breakages pass on the program as it is", flush=True)
        caught = 0
        for breakage in chosen:
            began = time.monotonic()
            outcome, why = try_breakage(breakage, folder)
            caught += outcome == "caught"
            print(f"{outcome:13} {time.monotonic() - began:3.0f} s  {breakage.name}", *filter(None, [why]), flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
