"""Models that ranks share, by FSDP2: what comes of them is what one process makes of copies.

Two ranks on the CPU, by gloo. helpers/together.py computes on one process, by DDP and by FSDP2, and
has main() run with a stub of vLLM; at the end are runs with vLLM itself. test_ends.py has a fault
under FSDP2.
"""

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from helpers import ASYNC, GRPO, PPO, REPO, SCRIPTS, fsdp2, loops, rollouts
from helpers.files import read_json_lines
from helpers.processes import CPU, TWO_RANKS, answers_of_vllm, environment
from helpers.runs import batch_of, response_tokens, without_clock
from helpers.together import CASES, step_and_save
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ppo_vllm_async as ppo

SHARED = ("ddp", "fsdp2")
# What differs where the batch is cut in another way, or by the clock
NOT_COMPARED = ("time/", "perf/")


def check_metrics(found, expected):
    found, expected = (
        {name: value for name, value in line.items() if not name.startswith(NOT_COMPARED)}
        for line in (found, expected)
    )
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


# ------------------------------------------------------------------------------- without processes


def parsed(name):
    """What accelerate's launcher makes of a file in scripts/accelerate."""
    path = REPO / "scripts" / "accelerate" / name
    args = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    return _validate_launch_command(args)[0]


@pytest.mark.parametrize(
    ("name", "processes", "machines", "is_sharded"),
    [
        ("one_gpu.yaml", 1, 1, False),
        ("ddp.yaml", 8, 1, False),
        ("fsdp2.yaml", 8, 1, True),
        ("fsdp2_two_nodes.yaml", 16, 2, True),
    ],
)
def test_launcher_reads_our_files(name, processes, machines, is_sharded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    args = parsed(name)
    assert (args.num_processes, args.num_machines) == (processes, machines)
    assert args.mixed_precision == "no" and args.use_fsdp == is_sharded
    variables = {}
    if processes > 1:
        args.main_process_ip, args.main_process_port, args.machine_rank = "host", 29500, 0
        variables = prepare_multi_gpu_env(args)
    sharding = {name: variables.get(name) for name in fsdp2.ENVIRONMENT}
    assert sharding == (fsdp2.ENVIRONMENT if is_sharded else dict.fromkeys(sharding))


@pytest.mark.parametrize("count", [1, 5, 6])
def test_each_rank_scores_in_as_many_passes(count):
    """One at a time, of held-out prompts. In a pass of its own a rank would wait for ever."""
    args = rollouts.tiny_args(local_rollout_forward_batch_size=1)
    model, passes = rollouts.tiny_value_model(), Counter()
    model.register_forward_hook(lambda *_: passes.update([rank]))
    for rank in range(2):
        accelerator = rollouts.one_of_ranks(rank, 2)
        responses = rollouts.groups_of_equals()[: 4 * count : 4]
        assert len(ppo.reward_model_scores(accelerator, model, responses, args)) == count
    assert passes[0] == passes[1] == (count + 1) // 2


# ------------------------------------------------------------------------ what ranks make together


def options_of(name, ranks, files):
    """Of three steps, each of two updates; what all ranks do together is always the same."""
    options = {
        "dataset": files / "train.parquet",
        "eval_dataset": files / "test.parquet",
        "eval_prompts": 7,  # which is a multiple of no number of ranks
        "num_evals": 1,
        "run_name": "run",
        "dtype": "float32",
        "response_length": 6,
        "total_episodes": 3 * 32,
        "local_rollout_batch_size": 8 // ranks,
        "number_samples_per_prompt": 4,
        "local_mini_batch_size": 16 // ranks,
        "per_device_train_batch_size": 4 // ranks,
        "local_rollout_forward_batch_size": 4 // ranks,
        "learning_rate": 1e-3,
        "beta": 0.3,
        "temperature": 1.3,
        "non_stop_penalty": True,
        "penalty_reward_value": -1.0,
        "min_response_length": 4,
    }
    if name in PPO:
        options["value_learning_rate"] = 2e-3
    if name == "ppo_vllm_async.py":
        options["micro_batch_tokens"] = 80
    if name in GRPO:
        options["vllm_gpus"] = 2  # so only the first rank has an engine
    return {
        name: value if isinstance(value, bool) else str(value) for name, value in options.items()
    }


@pytest.fixture(scope="module")
def tied_model(assets, tmp_path_factory):
    path = tmp_path_factory.mktemp("tied")
    options = {"tie_word_embeddings": True, "initializer_range": 0.3}
    config = AutoConfig.from_pretrained(assets / "model", **options)
    torch.manual_seed(6)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(assets / "model").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def together(accelerator, few_prompts, reward_model, tied_model, assets, tmp_path_factory):
    """What one process ("one") and two ranks ("ddp", "fsdp2") found: helpers/together.py.

    In folder are their runs, see run_of: of "three" steps in float64; of "four" with a checkpoint
    after two; and those that go "on" from there.
    """
    folder, found = tmp_path_factory.mktemp("together"), SimpleNamespace()

    def entry(how, kind, name):
        options = options_of(name, 1 if how == "one" else 2, few_prompts)
        options["model_name_or_path"] = str(tied_model if name in GRPO else assets / "model")
        options["output_dir"] = str(folder / f"{how} {kind} {name}")
        if name == "ppo_sync.py":
            options["reward_model_path"] = str(reward_model)
        if kind != "three":
            options |= {"total_episodes": str(4 * 32), "save_freq": "2"}
            if name in PPO:
                options["value_warmup_steps"] = "2"
            if name == "ppo_sync.py":
                options["lora_rank"] = "4"
        copied = None
        if kind == "on":
            copied = str(folder / f"fsdp2 four {name}" / "run")
            options["resume_from_checkpoint"] = "latest"
        return name, options, kind == "three", copied

    found.saved = step_and_save(accelerator, folder / "checkpoint_alone")
    kinds = {"ddp": ("three",), "fsdp2": ("three", "four", "on"), "one": ("three", "on")}
    for how in kinds:
        entries = [entry(how, kind, name) for kind in kinds[how] for name in SCRIPTS]
        (folder / f"{how}.json").write_text(json.dumps(entries))
        env = environment(
            CPU | {"OMP_NUM_THREADS": "1"} | ({"FSDP2": "1"} if how == "fsdp2" else {})
        )
        launcher = () if how == "one" else TWO_RANKS
        program = str(REPO / "tests" / "helpers" / "together.py")
        command = [sys.executable, *launcher, program, str(folder), how]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-5000:]
        setattr(found, how, torch.load(folder / f"{how}.pt", weights_only=False))
    found.folder = folder
    return found


def run_of(together, how, kind, name):
    run_dir = together.folder / f"{how} {kind} {name}" / "run"
    return SimpleNamespace(run_dir=run_dir, metrics=read_json_lines(run_dir / "metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("how", SHARED)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_their_norm_and_the_step_are_those_of_one_process(case, how, together):
    found, expected = getattr(together, how), together.one
    assert (found["ranks"], expected["ranks"]) == (2, 1)
    assert expected[case]["policy norm"] > 1  # so it is clipped
    assert found[case].keys() == expected[case].keys()
    for name, value in expected[case].items():
        assert value.dtype == torch.float64
        assert (found[case][name] - value).norm() < 1e-10 * value.norm(), name


@pytest.mark.slow
def test_each_layer_is_a_unit_and_is_gathered_in_the_dtype_of_the_flag(together):
    """Of two architectures in one process. Without names of layers the model would be one unit."""
    for name, model in together.fsdp2["units"].items():
        layers = {f"model.model.layers.{i}" for i in range(2)}
        assert model["units"] == {"", *layers}, name
        # Whole ones. What is trained and no layer computes in float32
        embedding = torch.float32 if name == "trained" else torch.bfloat16
        dtypes = {f"{layer}.mlp": torch.bfloat16 for layer in layers}
        dtypes["model.model.embed_tokens"] = embedding
        assert model["in forward"] == {part: {(False, dtypes[part])} for part in dtypes}
        assert model["after"] == {True}  # parts again
    # 14 layers have an adapter, of two matrices
    for model, count in (("trained", 27), ("adapted", 28)):
        gradients = together.fsdp2["units"][model]["gradients"]
        assert len(gradients) == count
        for name, gradient in gradients.items():  # sums of two ranks, finer than what each has
            assert gradient.dtype == torch.float32
            assert (gradient != gradient.bfloat16()).any(), name


@pytest.mark.slow
@pytest.mark.parametrize("how", SHARED)
def test_reward_model_scores_any_number_of_responses(how, together):
    """Five, one at a time: a rank that made a pass more would wait in it for ever."""
    assert len(together.one["scores"]) == 5
    assert getattr(together, how)["scores"] == pytest.approx(together.one["scores"], abs=1e-5)


# ------------------------------------------------------------------------------------- checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("alone", "ddp"),
        ("alone", "fsdp2"),
        ("ddp", "fsdp2"),
        ("ddp", "one"),
        ("fsdp2", "one"),
        ("fsdp2", "fsdp2"),
    ],
)
def test_checkpoint_is_read_under_any_number_of_ranks(writer, reader, together):
    folder = together.folder / f"checkpoint_{writer}"
    # The policy's optimizer had not stepped
    parts = {path.name for path in folder.iterdir()}
    assert parts == {"policy", "value_model", "value_model_optimizer"}
    saved = together.saved if writer == "alone" else getattr(together, writer)["saved"]
    _, states = saved["value_model"]
    assert {state["step"].item() for state in states} == {2}
    found = getattr(together, reader)[folder.name]
    torch.testing.assert_close(found, saved, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_four_steps_are_two_and_two(name, together):
    run, resumed = (run_of(together, "fsdp2", kind, name) for kind in ("four", "on"))
    lines = [list(map(without_clock, one.metrics)) for one in (run, resumed)]
    assert len(lines[0]) == 4 and lines[0] == lines[1]
    for path in ("samples.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (run.run_dir / path).read_bytes() == (resumed.run_dir / path).read_bytes()
    # It was gone on with: the first lines are those that were copied, with their times
    assert run.metrics[1] == resumed.metrics[1] and run.metrics[2] != resumed.metrics[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_checkpoint_has_no_pickle_and_no_state_of_an_optimizer_that_has_not_stepped(name, together):
    (folder,) = (run_of(together, "fsdp2", "four", name).run_dir / "checkpoints").iterdir()
    models = {"policy", "policy_optimizer", "value_model", "value_model_optimizer"}
    if name in PPO:
        models.remove("policy_optimizer")  # only the value model has learnt
    else:
        models -= {"value_model", "value_model_optimizer"}
    assert {path.name for path in folder.iterdir() if path.is_dir()} == models
    ours = {path.suffix for path in folder.iterdir() if path.is_file()}
    assert ours == {".json", ".jsonl"} | ({".safetensors"} if name in ASYNC else set())
    assert {path.suffix or path.name for path in folder.glob("*/*")} == {".distcp", ".metadata"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_one_process_goes_on_with_what_two_ranks_shared(name, together):
    run, resumed = (
        run_of(together, how, kind, name) for how, kind in (("fsdp2", "four"), ("one", "on"))
    )
    assert len(resumed.metrics) == 4
    check_metrics(resumed.metrics[2], run.metrics[2])


# -------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("how", SHARED)
@pytest.mark.parametrize("name", SCRIPTS)
def test_weights_after_three_steps_are_those_of_one_process(
    name, how, together, assets, tied_model
):
    run, alone = (run_of(together, one, "three", name) for one in (how, "one"))
    for line, expected in zip(run.metrics, alone.metrics, strict=True):
        check_metrics(line, expected)
    began_with = tied_model if name in GRPO else assets / "model"
    folders = (run.run_dir / "model", alone.run_dir / "model", began_with)
    found, expected, first = (load_file(folder / "model.safetensors") for folder in folders)
    if name in GRPO and how == "fsdp2":  # what is gathered shares no memory: it is saved twice
        assert torch.equal(found.pop("lm_head.weight"), found["model.embed_tokens.weight"])
    assert found.keys() == expected.keys() == first.keys()
    for weight, value in expected.items():
        assert (value - first[weight]).abs().max() > 1e-4  # it has learnt
        assert (found[weight] - value).abs().max() < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("how", SHARED)
def test_vllm_gets_the_whole_weights(how, together):
    """Also where one rank alone has an engine: the others give their parts."""
    assert getattr(together, how)["not sent"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [("FSDP_VERSION", "FSDP2 alone"), ("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")],
)
def test_sharding_of_another_kind_is_refused_before_anything_is_written(name, message, together):
    said, sizes = together.fsdp2["refusals"][name]
    assert message in said and "scripts/accelerate" in said
    assert not (together.folder / name).exists()
    # So that is what it would do: the frozen models of all ranks but one would be zeros
    assert sizes[0] > 0 and sizes[1] == (0 if "LOADING" in name else sizes[0])


# ----------------------------------------------------------------------------------------- for real


def answers_of_transformers(path, prompts):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    answers = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=8)[0]
        answers.append(
            tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return answers


@pytest.mark.slow
def test_saved_models_are_loaded_by_transformers_and_vllm(together, tmp_path):
    runs = {name: run_of(together, "fsdp2", "four", name) for name in ASYNC}
    samples = read_json_lines(runs["ppo_vllm_async.py"].run_dir / "samples.jsonl")
    prompts = [sample["prompt"] for sample in samples[:4]]
    paths = {name: run.run_dir / "model" for name, run in runs.items()}
    for name, path in paths.items():
        model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(
            report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name in GRPO)  # tied
        (tmp_path / name).mkdir()
    with ThreadPoolExecutor() as threads:
        found = threads.map(
            lambda name: answers_of_vllm(paths[name], prompts, tmp_path / name), paths
        )
        for path, answers in zip(paths.values(), found, strict=True):
            assert answers == answers_of_transformers(path, prompts)


REAL = {
    "ppo_sync.py": {},
    # A turn after the other: so the second step's sampler, too, must have the learner's weights
    "ppo_vllm_async.py": {"async_mode": False, "vllm_gpus": 2},
    "grpo_vllm_async.py": {"vllm_gpus": 2},
}


def replaying(raw):
    """Has loops.run_loop's vLLM give the responses of a batch."""
    make_stub = loops.make_stub

    def make(script):
        class Replay(make_stub(script)):
            def sample(self, prompts, seeds, temperature, num_samples):
                if not prompts:
                    return []
                logprobs = response_tokens(raw["mask"], raw["sampler_logprobs"])
                rows = zip(prompts, raw["responses"], logprobs, strict=True)
                return [
                    rollouts.response_of(prompt, ids, logprobs, stopped=ids[-1] == loops.STOP)
                    for prompt, ids, logprobs in rows
                ]

        return Replay

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_first_step_is_that_of_one_process(
    name, run_script, run_main, assets, monkeypatch, tmp_path
):
    """With vLLM itself; one process then takes its responses, and says the same of them."""
    sizes = {
        "local_rollout_batch_size": 8,
        "local_mini_batch_size": 8,
        "per_device_train_batch_size": 4,
        "local_rollout_forward_batch_size": 4,
    }
    options = sizes | REAL[name] | {"lr_scheduler_type": "constant"}
    env = CPU | {"FSDP2": "1", "OMP_NUM_THREADS": "1"}
    run = run_script(name, tmp_path, launcher=TWO_RANKS, env=env, save_batches=True, **options)
    assert run.returncode == 0, run.output
    assert run.stdout.count("Folders of vLLM") == (2 if name == "ppo_sync.py" else 1)
    assert len(run.metrics) == 2

    monkeypatch.setattr(loops, "make_stub", replaying(batch_of(run, 1)))
    args = json.loads((run.run_dir / "args.json").read_text())
    same = ("dataset", "response_length", "number_samples_per_prompt", "learning_rate", "beta")
    same += ("temperature", "non_stop_penalty", "min_response_length", "gradient_checkpointing")
    same += ("lr_scheduler_type", "kl_estimator")
    if name in PPO:
        same += ("value_learning_rate", "gamma", "lam", "value_lam")
    options = {key: args[key] for key in same} | {key: 2 * size for key, size in sizes.items()}
    alone = run_main(name, total_episodes=32, **options)
    check_metrics(alone.metrics[0], run.metrics[0])
